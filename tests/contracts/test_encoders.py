"""What must hold for encoders of every family: attention without causal mask, norms after or before, texts, images."""

import json

import pytest
import torch
import transformers
from torch import nn

import rankfold
from families import some_ids
from rankfold.calibration import runner
from rankfold.calibration.runner import advance, outputs, start
from rankfold.compression.budget import rank_options
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.compression.plan import shares
from rankfold.compression.replace import replace
from rankfold.data.batches import again
from rankfold.errors import UnsupportedModelError
from rankfold.methods.base import BlockResult
from rankfold.methods.result import put_attention
from rankfold.modules import CompressedAttention
from tiny_encoders import ENCODERS, batch_of, opened_encoder, samples_of, states, tiny_encoder

TEXTS = [family for family in ENCODERS if opened_encoder(family).part.name == "language"]
ALIKE = {"xlm-roberta", "clip-vision-alone", "siglip-text"}  # their specs say nothing that those of others do not
METHODS = [("modegpt", family) for family in ENCODERS if family not in ALIKE]
METHODS += [("rankfold", family) for family in ("bert", "vit-head", "modernbert-head", "qwen2.5-vl")]
METHODS += [("latentllm", family) for family in ("bert-head", "clip-vision", "qwen2.5-vl")]
METHODS += [(name, "vit-head") for name in ("svd-llm", "flap", "shortgpt", "wanda")]


def method_of(name: str):
    """What a block loses by blocks is a third of three, and by zeros a half."""
    sparsity = {"shortgpt": 0.3, "wanda": 0.5}.get(name, 0.3)
    steps = {} if name in ("shortgpt", "wanda") else {"rank_multiple": 1 if name == "flap" else 2}
    return rankfold.make_method(name, sparsity=sparsity, **steps)


@pytest.fixture(scope="module", params=METHODS, ids="-".join)
def run(request, tmp_path_factory):
    """Method, family, source, the folder written, and the model read back from it."""
    name, family = request.param
    source, folder = opened_encoder(family), tmp_path_factory.mktemp("encoders") / "small"
    rankfold.compress(source, method=method_of(name), calibration=samples_of(source), output=folder)
    return name, family, source, folder, rankfold.load(folder, device="cpu")


def test_the_folder_loads_by_its_auto_class_with_its_head(run):
    name, family, source, folder, again = run
    model = rankfold.compress(source, method=method_of(name), calibration=samples_of(source)).model
    assert type(again) is type(source.model)
    assert torch.equal(states(again, family, batch_of(source)), states(model, family, batch_of(source)))
    auto = (folder / "README.md").read_text().partition("from transformers import ")[2].partition(",")[0]
    assert type(getattr(transformers, auto).from_pretrained(folder)) is type(source.model)
    if source.part.packed:
        return  # transformers finds no tower for a class without a head by the names that its own modules have
    body = transformers.AutoModel.from_pretrained(folder).eval()
    if hasattr(body, "base_model") and body is body.base_model and ENCODERS[family].part is None:
        torch.testing.assert_close(
            states(body, "alone", batch_of(source))
            if family != "siglip-head"
            else states(body, family, batch_of(source)),
            states(model, family, batch_of(source)),
        )


def test_planned_equals_actual_and_what_is_no_block_stays_as_it_was(run):
    _, _, source, folder, model = run
    record = json.loads((folder / "rankfold.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == record["counts"]["parameters"]
    assert record["counts"]["sparsity"] >= 0.28 and record["counts"]["kv_bytes_per_token"] == 0
    blocks, small = f"{source.architecture.blocks}.", model.state_dict()
    around = {key: tensor for key, tensor in source.model.state_dict().items() if not key.startswith(blocks)}
    assert around and all(torch.equal(small[key], tensor) for key, tensor in around.items())


def test_the_record_says_how_far_held_out_states_have_moved(run):
    _, family, source, folder, model = run
    held_out = samples_of(source).held_out
    dense, small = (states(m, family, held_out).flatten(0, 1).double() for m in (tiny_encoder(family), model))
    found = json.loads((folder / "rankfold.json").read_text())["held_out"]
    cosine = nn.functional.cosine_similarity(dense, small, dim=-1).mean().item()
    error = ((dense - small).square().sum() / (dense - dense.mean(0)).square().sum()).sqrt().item()
    assert (found["cosine"], found["state_error"]) == pytest.approx((cosine, error), rel=1e-3)
    assert found["windows"] == 8 and (found["warning"] is None) == (error - 2 * found["standard_error"] < 1)


@pytest.fixture(scope="module", params=sorted(ENCODERS))
def family(request):
    return request.param


def test_blocks_run_one_by_one_as_the_model_runs_them(family):
    source = opened_encoder(family)
    batch = batch_of(source, 3)
    stream = start(source, batch, autocast=None)
    for index in range(len(source)):
        advance(source.block(index), stream)
    (given,) = again(batch, stream.hidden)
    torch.testing.assert_close(outputs(source, given, stream), states(source.model, family, batch))


def test_replacing_attention_at_full_rank_changes_nothing(family):
    """The runtime alone must be exact, also where the output projection is not in the attention module."""
    source = opened_encoder(family)
    view, result = source.block(1), BlockResult()
    attention, full = view.attention, view.attention.head_dim
    projections = dict(zip("qkvo", (*attention.qkv(), attention.output), strict=True))
    put_attention(result, attention, projections, full, full)
    stream, reference = (start(source, batch_of(source), autocast=None) for _ in range(2))
    advance(source.block(1), reference)
    advance(replace(view, result, source), stream)
    assert any(isinstance(m, CompressedAttention) for m in view.module.modules())
    torch.testing.assert_close(stream.hidden[0], reference.hidden[0], rtol=1e-5, atol=1e-5)


def test_sparsity_zero_changes_nothing(family):
    source = opened_encoder(family)
    model = rankfold.compress(source, method=rankfold.MoDeGPT(sparsity=0.0), calibration=samples_of(source)).model
    torch.testing.assert_close(states(model, family, batch_of(source)), states(source.model, family, batch_of(source)))


def small_one(family: str):
    source = opened_encoder(family)
    return source, rankfold.compress(
        source, method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2), calibration=samples_of(source)
    ).model


@pytest.mark.parametrize("family", ["bert-head", "modernbert-head", "clip-vision", "siglip-text", "qwen2.5-vl"])
def test_eager_and_sdpa_attention_agree(family):
    source, model = small_one(family)
    sdpa = states(model, family, batch_of(source))
    model.set_attn_implementation("eager")
    torch.testing.assert_close(states(model, family, batch_of(source)), sdpa, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TEXTS)
def test_padding_on_the_right_changes_nothing(family):
    _, model = small_one(family)
    ids = some_ids(1, 12)
    pad = torch.full((1, 5), model.config.get_text_config().pad_token_id)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 5, dtype=torch.long)], 1)
    padded = states(model, family, torch.cat([ids, pad], 1), attention_mask=mask)
    torch.testing.assert_close(padded[:, :12], states(model, family, ids), rtol=1e-4, atol=1e-5)


def test_what_comes_later_is_seen_too():
    _, model = small_one("bert")
    ids = some_ids(1, 12)
    other = ids.clone()
    other[0, -1] = 4
    before, after = (states(model, "bert", x) for x in (ids, other))
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4


def test_costs_are_squared_relative_changes_of_the_last_states():
    """Brute force: each module compressed alone, the whole model run."""
    source, method = opened_encoder("bert"), rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    text = samples_of(source)
    units, averages = shares(rank_options(source, method), method)
    costs = measure_kl_sensitivity(source, method, text, units, averages)
    ids = text.held_out[:4, :128]
    dense = states(source.model, "bert", ids)
    for unit in units:
        average = averages[unit.block, unit.module]
        rank = min(unit.ranks[:-1], key=lambda rank: (abs(unit.size(rank) - (1 - average) * unit.dense), rank))
        protected = tuple(b for b in range(3) if b != unit.block)
        share = (1 - unit.size(rank) / unit.dense) / 3  # of what the three blocks have
        alone = rankfold.MoDeGPT(modules={unit.module: share - 1e-6}, rank_multiple=2, exclude_blocks=protected)
        model = rankfold.compress(source, method=alone, calibration=text, mode="one-pass").model
        change = (states(model, "bert", ids) - dense).square().sum() / dense.square().sum()
        assert costs[unit.block, unit.module][rank] == pytest.approx(change.item(), rel=0.02)


def test_states_of_several_batches_are_told_about_one_mean(monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 72)  # three windows
    source = opened_encoder("bert")
    text = samples_of(source)
    model = rankfold.compress(source, method=method_of("modegpt"), calibration=text).model
    found = model.config.quantization_config.fields["held_out"]
    dense, small = (states(m, "bert", text.held_out).flatten(0, 1).double() for m in (tiny_encoder("bert"), model))
    error = ((dense - small).square().sum() / (dense - dense.mean(0)).square().sum()).sqrt().item()
    assert found["state_error"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("name", ["obd", "llm-surgeon", "sleb"])
def test_a_loss_that_there_is_not_is_refused(name):
    source = opened_encoder("bert")
    with pytest.raises(UnsupportedModelError, match="of the next-token loss, and bert predicts no next token; take"):
        rankfold.compress(source, method=rankfold.make_method(name, sparsity=0.3), calibration=samples_of(source))


def test_blocks_are_read_one_by_one(tmp_path):
    tiny_encoder("bert-head").save_pretrained(tmp_path)
    source = rankfold.open_model(tmp_path, device="cpu")
    assert source.streamed and next(source.blocks.parameters()).is_meta
    expected = states(tiny_encoder("bert-head"), "bert-head", some_ids())
    torch.testing.assert_close(states(source.whole_model(), "bert-head", some_ids()), expected)
