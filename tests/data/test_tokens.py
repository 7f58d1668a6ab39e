"""Token windows: packing, seeds, clamping, and ids that do not belong to the model."""

import hashlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rankfold.data.calibration_data import CalibrationData, shown
from rankfold.data.load import load_calibration
from rankfold.data.text import Text
from rankfold.data.text_samples import draw_tokens, pack
from rankfold.data.tokens import check_vocabulary, encode
from rankfold.errors import DataError, OptionError
from rankfold.models.opening import open_model


def characters(text: str, return_tensors: str, verbose: bool = True, add_special_tokens: bool = True):
    """A tokenizer with one id a character."""
    assert return_tensors == "pt"
    return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 97 for c in text]], dtype=torch.long))


def source(context: int = 64, vocabulary: int = 97):
    config = SimpleNamespace(vocab_size=vocabulary)
    decoder = {
        "part": SimpleNamespace(takes_images=False),
        "architecture": SimpleNamespace(decoder=True, needs_start=False),
        "image_token": None,
    }
    return SimpleNamespace(name="model", context_length=context, tokenizer=characters, config=config, **decoder)


@pytest.fixture
def text(tmp_path):
    def make(length: int) -> str:
        (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(length)))
        return str(tmp_path / "a.txt")

    return make


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 12), st.integers(0, 1000))
def test_windows_are_distinct_cuts_of_the_stream(n, length, samples, seed):
    out = pack(torch.arange(n), samples=samples, length=length, seed=seed)
    assert out.shape == (min(samples, n // length), length)
    assert len(set(out[:, 0].tolist())) == len(out)
    for window in out:
        assert window[0] % length == 0
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + length))


def test_the_same_seed_draws_the_same_windows_and_another_draws_others():
    ids = torch.arange(1000)
    a, b, c = (pack(ids, samples=8, length=10, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_the_draw_does_not_touch_the_global_generator():
    before = torch.get_rng_state()
    pack(torch.arange(100), samples=3, length=10, seed=7)
    assert torch.equal(before, torch.get_rng_state())


def test_more_samples_begin_with_the_fewer():
    ids = torch.arange(1000)
    assert torch.equal(pack(ids, samples=8, length=10, seed=0)[:5], pack(ids, samples=5, length=10, seed=0))


def test_windows_own_their_memory():
    ids = torch.arange(100)
    out = pack(ids, samples=2, length=10, seed=0)
    out.zero_()
    assert torch.equal(ids, torch.arange(100)) and out.is_contiguous()


def test_loaded_tokens_describe_themselves(text):
    name = text(1000)
    tokens = load_calibration(name, source(), num_samples=4, max_length=32, seed=3)
    assert tokens.ids.shape == (4, 32) and tokens.ids.dtype == torch.int64
    assert (
        tokens.describe()
        == {
            "source": name.rpartition("/")[2],  # no path of this machine in a record
            "origin": tokens.origin,
            "draw": "windows of the whole text",
            "num_samples": 4,
            "max_length": 32,
            "tokens": 128,
            "seed": 3,
            "sha256": hashlib.sha256(tokens.ids.numpy().tobytes()).hexdigest()[:32],
            "held_out": 1,
            "held_out_sha256": hashlib.sha256(tokens.held_out.numpy().tobytes()).hexdigest()[:32],
        }
    )


def test_same_text_and_seed_give_the_same_hash_and_any_change_another(text):
    name = text(1000)
    base = load_calibration(name, source(), num_samples=4, max_length=32)
    assert base.sha256 == load_calibration(name, source(), num_samples=4, max_length=32).sha256
    for change in ({"seed": 1}, {"num_samples": 3}, {"max_length": 16}):
        assert base.sha256 != load_calibration(name, source(), **{"num_samples": 4, "max_length": 32, **change}).sha256


def test_the_hash_tells_window_shapes_apart():
    ids = torch.arange(64)
    a, b = (CalibrationData(ids.view(*shape), "a", "a", 0) for shape in ((4, 16), (2, 32)))
    assert a.describe() != b.describe()


@pytest.mark.parametrize(
    "name, expected", [("/home/somebody/a.txt", "a.txt"), ("c4:/home/somebody/a.jsonl", "c4:a.jsonl"), ("c4", "c4")]
)
def test_folders_of_this_machine_are_not_shown(name, expected):
    assert shown(name) == expected


@pytest.mark.parametrize("ids, got", [(torch.zeros(4, 8), r"\[4, 8\] of torch\.float32"), ([[1, 2]], "list")])
def test_ids_of_another_kind_are_refused(ids, got):
    with pytest.raises(
        DataError,
        match=rf"^ids must be a tensor \(samples, length\) of int64 token ids, or pixels .*, got {got}$",
    ):
        CalibrationData(ids, "random", "random", 0)


def test_length_is_clamped_to_the_context_and_said(text, caplog):
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration(text(1000), source(context=48), num_samples=2, max_length=2048)
    assert tokens.ids.shape == (2, 48)
    assert "length 2048 is more than the model's context; using 48" in caplog.text


def test_samples_are_clamped_to_the_text_and_said(text, caplog):
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration(text(200), source(), num_samples=128, max_length=64)
    assert tokens.ids.shape == (2, 64) and tokens.held_out.shape == (1, 64)
    assert "the text fills 3 samples of 64 tokens, not 136: 2 fitted, 1 held out" in caplog.text
    assert tokens.describe()["num_samples_wanted"] == 128  # another draw, of 2, would hold out another one
    whole = load_calibration(text(2000), source(), num_samples=2, max_length=64)
    assert "num_samples_wanted" not in whole.describe()


def test_a_text_shorter_than_a_window_gives_one_shorter_window(text, caplog):
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration(text(50), source(), num_samples=1, max_length=64)
    assert tokens.ids.shape == (1, 32)
    assert "the text has 50 tokens, less than one sample; using length 32" in caplog.text


def test_a_short_window_that_was_asked_for_is_given(text):
    assert load_calibration(text(28), source(), num_samples=2, max_length=8).ids.shape == (2, 8)


@pytest.mark.parametrize("length", [1, 31])
def test_too_little_text_is_refused(text, length):
    with pytest.raises(
        DataError, match=rf"has {length} tokens?; at least 32 are needed, and 256 wanted .*; give more text"
    ):
        load_calibration(text(length), source(), num_samples=3, max_length=64)


@pytest.mark.parametrize(("samples", "length"), [(0, 64), (-1, 64), (4, 1), (4, 0)])
def test_samples_and_length_have_a_range(samples, length):
    with pytest.raises(OptionError, match=rf"num_samples must be >= 1 and max_length >= 2, got {samples} and {length}"):
        load_calibration("pydoc", source(), num_samples=samples, max_length=length)


def test_a_tokenizer_of_another_model_is_refused(text):
    with pytest.raises(
        DataError, match=r"token id \d+, the model has 10 embeddings; tokenizer and model do not belong"
    ):
        load_calibration(text(1000), source(vocabulary=10), num_samples=2, max_length=32)


@pytest.mark.parametrize(
    ("windows", "samples", "fit", "held_out"),
    [
        (500, 32, 32, 4),  # one for eight
        (500, 100, 100, 8),  # at most 8
        (500, 3, 3, 1),  # at least one
        (36, 32, 32, 4),
        (35, 32, 31, 4),  # too few for both: out of the samples
        (32, 32, 28, 4),
        (9, 32, 8, 1),
        (2, 32, 1, 1),
        (1, 32, 1, 0),  # a single window is fitted
        (1, 1, 1, 0),
    ],
)
def test_windows_after_the_samples_are_held_out(text, windows, samples, fit, held_out):
    """Reference: the permutation of all windows of the stream, cut by hand."""
    name = text(windows * 16 + 5)
    tokens = load_calibration(name, source(), num_samples=samples, max_length=16, seed=5)
    stream = characters(Path(name).read_text(encoding="utf-8"), "pt").input_ids[0]
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(5))
    drawn = torch.stack([stream[i * 16 : i * 16 + 16] for i in order.tolist()])
    assert torch.equal(tokens.ids, drawn[:fit])
    if held_out:
        assert torch.equal(tokens.held_out, drawn[fit : fit + held_out])
    else:
        assert tokens.held_out is None and "held_out_sha256" not in tokens.describe()
    assert tokens.describe()["held_out"] == held_out


def test_vocabulary_is_checked_at_its_edge():
    check_vocabulary(torch.tensor([0, 9]), 10)
    check_vocabulary(torch.tensor([], dtype=torch.long), 10)
    with pytest.raises(DataError, match="token id 10, the model has 10 embeddings"):
        check_vocabulary(torch.tensor([0, 10]), 10)


def test_encode_joins_documents_by_a_blank_line():
    ids = encode(Text("a", ("b", "c"), "a"), source())
    assert torch.equal(ids, torch.tensor([ord(c) % 97 for c in "b\n\nc"]))


def test_windows_come_from_the_field_that_was_asked_for(tmp_path):
    rows = [{"text": "a" * 100, "body": "b" * 100}] * 3
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokens = load_calibration(str(tmp_path / "a.jsonl"), source(), num_samples=3, max_length=32, text_column="body")
    assert set(tokens.ids.flatten().tolist()) <= {ord("b") % 97, ord("\n") % 97}
    assert tokens.describe()["text_column"] == "body"
    (tmp_path / "a.txt").write_text("c" * 200)
    for name, field in (("a.jsonl", "text"), ("a.txt", "body")):
        assert (
            "field"
            not in load_calibration(
                str(tmp_path / name), source(), num_samples=3, max_length=32, text_column=field
            ).describe()
        )


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        max_position_embeddings=32,
    )
    return open_model(LlamaForCausalLM(config), device="cpu")


def test_text_of_the_model_itself_is_seeded_and_starts_with_its_start_token(llama):
    a, b, c = (load_calibration("self", llama, num_samples=18, max_length=12, seed=s) for s in (0, 0, 1))
    assert a.ids.shape == (18, 12) and a.ids.dtype == torch.int64 and a.origin == "self"
    assert torch.equal(a.ids, b.ids) and not torch.equal(a.ids, c.ids)
    assert (a.ids[:, 0] == 1).all() and a.ids.max() < 50


def test_windows_held_out_of_the_models_own_text_leave_the_others_alone(llama, monkeypatch):
    tokens = load_calibration("self", llama, num_samples=18, max_length=12)
    assert tokens.held_out.shape == (2, 12) and tokens.draw == "sampled"
    monkeypatch.setattr("rankfold.data.mixing.held_out_of", lambda samples: 5)
    more = load_calibration("self", llama, num_samples=18, max_length=12)
    assert torch.equal(tokens.ids, more.ids) and len(more.held_out) == 5
    assert not torch.equal(tokens.ids[:2], tokens.held_out)


def test_text_of_the_model_itself_follows_its_distribution(llama):
    """First tokens of many windows against the model's own probabilities after the start token."""
    ids = load_calibration("self", llama, num_samples=600, max_length=2).ids
    with torch.no_grad():
        wanted = llama.model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    seen = torch.bincount(ids[:, 1], minlength=50) / len(ids)
    assert (seen - wanted).abs().sum() < 0.4


def test_tokens_are_drawn_by_their_probabilities_and_never_where_those_are_zero():
    wanted = torch.tensor([0, 0.5, 0, 0.125, 0.375, 0])
    drawn = draw_tokens(wanted.log().repeat(20_000, 1), torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, 1)
    seen = torch.bincount(drawn[:, 0], minlength=6) / 20_000
    assert (seen - wanted).abs().max() < 0.015 and (seen[wanted == 0] == 0).all()  # four standard errors


def test_the_model_writes_no_more_tokens_side_by_side_than_fit(llama, monkeypatch):
    monkeypatch.setattr("rankfold.data.text_samples.WRITTEN_AT_ONCE", 40)
    rows = []
    with llama.model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0]))):
        assert load_calibration("self", llama, num_samples=8, max_length=12).ids.shape == (8, 12)
    assert max(rows) == 3 and sum(rows) == 9 * 11  # eight fitted and one held out


def test_text_of_the_model_itself_is_clamped_to_its_context(llama):
    assert load_calibration("self", llama, num_samples=1, max_length=100).ids.shape == (1, 32)
