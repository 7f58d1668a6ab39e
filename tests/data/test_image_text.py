"""Image-text examples: made by the model's processor, each run alone, measured as transformers runs them one by one."""

import json
import math

import pytest
import torch
from torch import nn

import rankfold
from activations import blocks_of, look
from families import opened as opened_text
from interrupted import assert_ends_in_the_same_bytes
from rankfold.calibration.backward import sweep
from rankfold.calibration.gradients import gradient_observers
from rankfold.calibration.moments import Moment
from rankfold.calibration.runner import advance, measure, outputs, start
from rankfold.compression.held_out import nats_per_token
from rankfold.compression.kl_divergence import _divergences
from rankfold.data.batches import Example, as_data, as_tensors, digest_of, first
from rankfold.data.image_text import has_images
from rankfold.errors import CheckpointError, DataError, OptionError
from tiny_pairs import FAMILIES, PLACE, examples_of, opened, picture, write_pairs
from versions import needs_merged_tables

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request, tmp_path_factory):
    """An open model, and examples for it."""
    source = opened(request.param)
    return source, examples_of(request.param, source, tmp_path_factory.mktemp(request.param))


def test_a_batch_is_an_example(pair):
    """Of its own length, with none, one or two images; nothing is padded."""
    source, examples = pair
    stream = start(source, examples.ids, autocast=None)
    lengths = [example.ids.shape[1] for example in examples.ids]
    assert [hidden.shape[:2] for hidden in stream.hidden] == [(1, length) for length in lengths]
    assert len(set(lengths)) > 3 and {example.images for example in examples.ids} == {False, True}
    for example in examples.ids:
        inputs = example.read()
        assert torch.equal(inputs["input_ids"], example.ids) and inputs["attention_mask"].all()
        assert ("pixel_values" in inputs) == example.images == bool((example.ids == PLACE).any())


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1])
def test_moments_are_those_of_the_models_own_forward(pair, index):
    source, examples = pair
    if source.architecture.model_type in ("qwen2_vl_text", "qwen2_5_vl_text"):
        needs_merged_tables()
    stream = start(source, examples.ids, autocast=None)
    for before in range(index):
        advance(source.block(before), stream)
    moments = measure(source.block(index), stream, {"query", "key", "mlp_hidden"}, step=False)
    seen = [look(source.model, example.read(), index) for example in examples.ids]
    hidden = torch.cat([one.hidden for one in seen]).double()
    assert moments["mlp_hidden"].count == len(hidden) == examples.tokens
    torch.testing.assert_close(moments["mlp_hidden"].second, hidden.T @ hidden, **CLOSE)
    for name, place, scale in (("query", 0, 8**0.5), ("key", 1, 1.0)):
        if source.architecture.model_type.startswith("gemma"):
            scale = math.sqrt(source.config.query_pre_attn_scalar) if name == "query" else 1.0
        x = torch.cat([scale * one.heads[place].double()[0] for one in seen], dim=1)  # (H, n, N)
        torch.testing.assert_close(moments[name].second, x.mT @ x, **CLOSE)


def after_all_blocks(source, examples):
    stream = start(source, examples.ids, autocast=None)
    for index in range(len(source)):
        advance(source.block(index), stream)
    return stream


@torch.no_grad()
def test_blocks_one_by_one_give_the_stock_logits(pair):
    source, examples = pair
    stream = after_all_blocks(source, examples)
    for example, hidden in zip(examples.ids, stream.hidden, strict=True):
        expected = source.model(**example.read(), use_cache=False).logits
        torch.testing.assert_close(outputs(source, example, stream, hidden), expected, **CLOSE)


def text_losses(model, example) -> torch.Tensor:
    """Nats of every token that is no placeholder, by the model's own forward."""
    logits = model(**example.read(), use_cache=False).logits[0, :-1].float()
    targets = example.ids[0, 1:]
    return nn.functional.cross_entropy(logits, targets, reduction="none")[targets != PLACE]


@torch.no_grad()
def test_perplexity_is_over_the_tokens_of_text(pair):
    source, examples = pair
    stream = after_all_blocks(source, examples)
    expected = torch.cat([text_losses(source.model, example) for example in examples.ids])
    assert len(expected) < examples.tokens - len(examples.ids)
    assert nats_per_token(source, examples.ids, stream) == pytest.approx(expected.mean().item(), rel=1e-5)


def test_gradients_are_those_of_the_loss_of_text(pair):
    source, examples = pair
    some, model = examples.ids[:4], source.model
    for example in some:
        text_losses(model, example).sum().backward()
    view = source.meta_block(0)
    wanted = {name: view.layers[name].weight.grad.double() for name in ("o", "down")}
    model.zero_grad(set_to_none=True)
    found = dict(sweep(source, some, gradient_observers({"o_weight_gradient", "down_weight_gradient"})))[0]
    for name, expected in wanted.items():
        got = found[f"{name}_weight_gradient"]
        assert got.count == len(some)
        torch.testing.assert_close(got.total, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@torch.no_grad()
def test_divergences_are_over_the_positions_that_text_follows(pair):
    """Two trials: nothing changed, and a stream that was scaled; the whole model's forward is the reference."""
    source, examples = pair
    some, factor = examples.ids[:3], 0.7
    stream = start(source, some, autocast=None)
    for index in range(len(source)):
        advance(source.block(index), stream)
    tried = stream.copy()
    tried.hidden += [hidden * factor + 0.1 for hidden in stream.hidden]
    same, other = _divergences(source, some, stream, tried)
    last, apart = blocks_of(source.model)[-1], []
    for example in some:
        dense = source.model(**example.read(), use_cache=False).logits
        hook = last.register_forward_hook(
            lambda _, __, out: (out[0] * factor + 0.1, *out[1:]) if isinstance(out, tuple) else out * factor + 0.1
        )
        changed = source.model(**example.read(), use_cache=False).logits
        hook.remove()
        p, q = (x[0].float().log_softmax(-1) for x in (dense, changed))
        follows = torch.cat([example.ids[0, 1:] != PLACE, torch.tensor([True])])
        apart.append((p.exp() * (p - q)).sum(-1)[follows])
    assert abs(same) < 1e-6 and other == pytest.approx(torch.cat(apart).mean().item(), rel=1e-3)


@torch.no_grad()
def test_other_images_give_other_moments(tmp_path):
    """The same texts with images of the same sizes, swapped: a measurement that lost the images would not see it."""
    source, found = opened("llava"), []
    for name in ("one", "two"):
        file = write_pairs(tmp_path / name)
        if name == "two":
            for image in (tmp_path / name / "images").iterdir():
                picture(977).save(image)
        examples = rankfold.load_calibration(file, source, num_samples=12, tokenizer=FAMILIES["llava"].processor())
        stream = start(source, examples.ids, autocast=None)
        found.append((examples, measure(source.block(0), stream, {"mlp_hidden"}, step=False)["mlp_hidden"]))
    (one, first_moment), (two, second_moment) = found
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(one.ids, two.ids, strict=True)) and one.sha256 != two.sha256
    assert first_moment.count == second_moment.count
    difference = (first_moment.second - second_moment.second).norm() / first_moment.second.norm()
    assert difference > 0.05


def test_the_record_names_what_was_measured(tmp_path):
    source, file = opened("llava"), write_pairs(tmp_path)
    examples, again = (
        rankfold.load_calibration(file, source, num_samples=12, tokenizer=FAMILIES["llava"].processor())
        for _ in range(2)
    )
    facts = examples.describe()
    assert facts == again.describe() and len(examples.held_out) == 1
    lengths = [example.ids.shape[1] for example in examples.ids]
    assert facts | {"origin": "", "sha256": "", "held_out_sha256": ""} == {
        "source": "pairs.jsonl",
        "origin": "",
        "draw": "examples of the whole file",
        "num_samples": 12,
        "max_length": max(lengths),
        "tokens": sum(lengths),
        "with_images": sum(example.images for example in examples.ids),
        "seed": 0,
        "sha256": "",
        "held_out": 1,
        "held_out_sha256": "",
        "num_samples_wanted": 12,
        "kind": "image-text examples",
    }
    other = rankfold.load_calibration(file, source, num_samples=12, seed=1, tokenizer=FAMILIES["llava"].processor())
    assert other.sha256 != examples.sha256


def test_what_the_template_makes_of_a_row(tmp_path):
    """User and answer in turns where there is a template; on lines where there is none."""
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"text": "who?", "image": ["a.png", "a.png"], "answer": "me"}))
    made = {
        family: rankfold.load_calibration(
            tmp_path / "pairs.jsonl", opened(family), tokenizer=FAMILIES[family].processor()
        )
        for family in ("llava", "gemma3")
    }
    assert all(len(examples.ids) == 1 and examples.held_out is None for examples in made.values())
    words = FAMILIES["llava"].processor().tokenizer
    text = words.decode(made["llava"].ids[0].ids[0]).replace(" ", "")
    assert text == "[user]" + "<image>" * 8 + "who?[assistant]me"
    text = words.decode(made["gemma3"].ids[0].ids[0]).replace(" ", "")
    image = "\n\n<start_of_image>" + "<image>" * 4 + "<end_of_image>\n\n"
    assert text == image * 2 + "\nwho?\nme"


def test_examples_go_through_a_file(pair):
    _, examples = pair
    back = as_data(as_tensors(examples.ids))
    assert digest_of(back) == examples.sha256 and [one.images for one in back] == [one.images for one in examples.ids]


def test_some_of_the_first_have_as_many_tokens(pair):
    source, examples = pair
    lengths = [example.ids.shape[1] for example in examples.ids]
    for wanted, count in ((1, 1), (lengths[0], 1), (lengths[0] + 1, 2), (10**6, len(lengths))):
        assert len(first(examples.ids, wanted, source.part)) == count


def test_the_covariance_within_windows_of_different_lengths():
    """Pooled: every window about its own mean, all tokens counting alike."""
    windows = [
        torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + n for n in (4, 9, 5)
    ]

    class View(nn.Module):
        pass

    from rankfold.calibration.observers import InputObserver, RanBatch

    layer = nn.Identity()
    observer = InputObserver(layer, absolute=False, windows=True)
    handles = observer.hooks()
    for window in windows:
        layer(window[None].float())
        observer.after(RanBatch(window[None].float(), {}, None))
    for handle in handles:
        handle.remove()
    moment: Moment = observer.finish()
    centred = torch.cat([window - window.mean(0) for window in windows])
    torch.testing.assert_close(moment.within_windows(), centred.T @ centred / len(centred), rtol=1e-5, atol=1e-5)


def row(**columns) -> str:
    return json.dumps({"text": "hello", "image": "a.png"} | columns)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row(image="gone.png"), r"line 2: its image '.*gone.png' is missing; put it there, or remove the row"),
        (row(image="broken.png"), "broken.png is not a readable image"),
        (row(image=[1]), r"line 2: column 'image' must hold a path, or a list of paths, got \[1\]"),
        (row(text=" "), "line 2: column 'text' is empty; every row needs a text"),
        (row(text=None), "column 'text' holds NoneType, not text"),
        (row(answer=3), "column 'answer' holds int, not text"),
        ('{"image": "a.png"}', "line 2 has no text column 'text'; the row has: image"),
        ("[1]", "line 2 has no text column 'text'; the row is a list"),
        (row(text="<image>"), "line 2: the model's processor makes nothing of it|must not hold the token"),
        (row(text="<image>", image=None), "line 2: the model's processor makes nothing of it|must not hold the token"),
        (
            row(text="long " * 200),
            "line 2: an example of 10.. tokens, images among them, is longer than the model's context",
        ),
        ("{", "line 2 is not JSON"),
    ],
)
def test_rows_that_cannot_be_used(line, message, tmp_path):
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "pairs.jsonl").write_text(row() + "\n" + line)
    with pytest.raises(DataError, match=message) as error:
        rankfold.load_calibration(tmp_path / "pairs.jsonl", opened("llava"), tokenizer=FAMILIES["llava"].processor())
    assert "\n" not in str(error.value)


def test_a_file_with_images_is_one_whose_rows_have_any(tmp_path):
    """The first row may have none; a model of text looks no further than that."""
    sees, reads = opened("llava"), opened_text("llama")
    file = tmp_path / "x.jsonl"
    for lines, expected in (
        (['{"text": "a"}', "", '{"text": "b", "image": "a.png"}'], (True, False)),
        (['{"text": "a", "image": null}'], (False, False)),  # text with a column that says nothing
        (['{"text": "the \\"image\\""}', '{"text": "image"}'], (False, False)),
    ):
        file.write_text("\n".join(lines))
        assert tuple(has_images(str(file), model) for model in (sees, reads)) == expected
    assert not has_images("pydoc", sees) and not has_images(str(tmp_path / "none.jsonl"), sees)


def test_models_and_files_that_cannot_be_used(tmp_path, monkeypatch):
    file, source = write_pairs(tmp_path), opened("llava")
    with pytest.raises(DataError, match="takes no images with its text, and pairs.jsonl has an image column"):
        rankfold.load_calibration(file, opened_text("llama"))
    with pytest.raises(CheckpointError, match="came without a processor; pass one as tokenizer"):
        rankfold.load_calibration(file, source)
    folder = tmp_path / "folder"
    source.model.save_pretrained(folder)
    with monkeypatch.context() as patch:

        def lacking(*_, **__):
            raise ImportError("\nIt requires the Torchvision library but it was not found")

        patch.setattr("rankfold.models.tokenizer.AutoProcessor.from_pretrained", lacking)
        with pytest.raises(OptionError, match="needs a package that is not installed .It requires the Torchvision"):
            rankfold.load_calibration(file, rankfold.open_model(folder, device="cpu"))
    with pytest.raises(DataError, match=r"no text at .*none\.jsonl': expected"):
        rankfold.load_calibration(tmp_path / "none.jsonl", source)
    with pytest.raises(OptionError, match="num_samples must be >= 1 and max_length >= 2, got 0 and 2048"):
        rankfold.load_calibration(file, source, num_samples=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty.jsonl' is empty; give a file with text"):
        rankfold.load_calibration(tmp_path / "empty.jsonl", source)
    examples = rankfold.load_calibration(file, source, num_samples=4, tokenizer=FAMILIES["llava"].processor())
    with pytest.raises(DataError, match="the language component of .* takes no image-text examples; calibrate on text"):
        rankfold.calibrate(opened_text("llama"), examples)
    with pytest.raises(DataError, match="ids must be a tensor .* of int64 token ids, or pixels .*, got tuple"):
        rankfold.CalibrationData((torch.ones(1, 4).long(),), "x", "x", 0)
    alone = Example.of({"input_ids": torch.tensor([[3, PLACE]])})
    with pytest.raises(DataError, match="no text after its first token"):
        rankfold.calibrate(source, rankfold.CalibrationData((alone,), "x", "x", 0))
    for image in (tmp_path / "images").iterdir():
        picture(5).save(image)
    with pytest.raises(DataError, match="an image changed while it was in use"):
        rankfold.calibrate(source, examples)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    source = opened("llava")
    examples = examples_of("llava", source, tmp_path / "data")
    method = rankfold.Rankfold(sparsity=0.3, rank_multiple=2)
    assert_ends_in_the_same_bytes(
        lambda folder: rankfold.compress(source, method=method, calibration=examples, output=folder).output,
        tmp_path,
        monkeypatch,
    )


@pytest.mark.parametrize(("name", "options"), [("llm-surgeon", {}), ("sleb", {"sparsity": 0.34}), ("slicegpt", {})])
def test_other_ways_of_measuring_take_examples(name, options, tmp_path):
    """Gradients, blocks left out in turn, and a stream in other coordinates."""
    source = opened("llava")
    examples = examples_of("llava", source, tmp_path)
    small = rankfold.compress(
        source, method=rankfold.make_method(name, **{"sparsity": 0.2} | options), calibration=examples
    ).model
    losses = [
        torch.cat([text_losses(model, example) for example in examples.held_out]).mean().item()
        for model in (small, source.model)
    ]
    assert all(map(math.isfinite, losses)) and losses[0] != losses[1]
