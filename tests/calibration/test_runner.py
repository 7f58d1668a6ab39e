"""Moments measured block by block, against the activations themselves."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

import rankfold
from activations import ATTENTION, member
from families import CONFIGS, GQA, some_ids, tiny_model, tokens
from rankfold.calibration import runner
from rankfold.calibration import statistics as table
from rankfold.calibration.runner import advance, measure, outputs, start
from rankfold.compression.importance import available
from rankfold.errors import NumericsError
from rankfold.report.identity import _precision

NAMES = {"mlp_hidden", "mlp_input", "attention_input", "attention_output"}


def opened(family="llama", autocast=None):
    source = rankfold.open_model(tiny_model(family), device="cpu")
    source.autocast = autocast
    return source


def captured(view, stream, path):
    """Inputs of one layer of the block, as they were."""
    seen = []
    handle = view.module.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    measure(view, stream, set(), step=False)
    handle.remove()
    return torch.cat([x.flatten(0, -2) for x in seen]).double()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_moments_equal_those_of_the_raw_activations_in_fp64(autocast, monkeypatch):
    """Under autocast too: products must not be rounded to bf16 because a hook runs inside the model's autocast."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 128)
    source = opened(autocast=autocast)
    view, stream = source.block(1), start(source, some_ids(16, 32), autocast=autocast)
    moments = measure(view, stream, NAMES | {"absolute"}, step=False)
    paths = {
        "mlp_hidden": "mlp.down_proj",
        "mlp_input": "mlp.up_proj",
        "attention_input": "self_attn.q_proj",
        "attention_output": "self_attn.o_proj",
    }
    for name, path in paths.items():
        x = captured(view, stream, path)
        reference = x.T @ x / len(x)
        scale = (reference.diagonal()[:, None] * reference.diagonal()).sqrt()
        assert ((moments[name].second_moment() - reference).abs() / scale).max() < 1e-5, name
        torch.testing.assert_close(moments[name].mean, x.mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(moments[name].mean_absolute, x.abs().mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox", "falcon-gqa", "gpt2"])
def test_queries_and_keys_are_measured_after_norm_and_rotation(family, monkeypatch):
    """Reference: what the attention kernel itself is called with."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    source = opened(family)
    ids = some_ids(4, 16)
    seen = {}
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        seen.update(q=query.double(), k=key.double(), v=value.double())
        return plain(query, key, value, *args, **kwargs)

    assert "sdpa" in ALL_ATTENTION_FUNCTIONS
    view, stream = source.block(0), start(source, ids, autocast=None)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    moments = measure(view, stream, {"query", "key", "key_spread", "query_key", "value"}, step=True)
    heads, kv = view.attention.heads, view.attention.kv_heads
    q, k, v = seen["q"], seen["k"], seen["v"]  # (B, H, T, N), the latter two perhaps repeated
    k, v = (x[:, :: x.shape[1] // kv] for x in (k, v))
    spread = k - k.mean(2, keepdim=True)
    for name, x in (("query", q), ("key", k), ("key_spread", spread), ("value", v)):
        torch.testing.assert_close(moments[name].second, torch.einsum("bhti,bhtj->hij", x, x), rtol=1e-4, atol=1e-4)
    grams = torch.einsum("bhti,bhtj->bhij", q, q) * torch.einsum("bhti,bhtj->bhij", spread, spread).repeat_interleave(
        heads // kv, 1
    )
    torch.testing.assert_close(moments["query_key"].second, grams.sum(0), rtol=1e-3, atol=1e-3)
    assert moments["query_key"].count == 4 * 16**2


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "phi", "bloom", "gpt_neox-sequential"])
def test_influence_is_one_minus_the_cosine(family):
    source = opened(family)
    ids = some_ids(4, 16)
    view, stream = source.block(0), start(source, ids, autocast=None)
    before = stream.hidden[0]
    moments = measure(view, stream, {"influence"}, step=True)
    block = (1 - torch.cosine_similarity(before, stream.hidden[0], dim=-1)).mean()
    torch.testing.assert_close(moments["influence"].mean[0].float(), block)
    assert (moments["influence"].mean[1:] > 0).all()


def test_batches_share_what_blocks_are_called_with_unless_it_depends_on_their_tokens(monkeypatch):
    """Gemma 4 hands every block an embedding of its own of each token."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 64)
    source, ids, recorded = opened(), some_ids(9, 32), []
    record = runner._Recorder.forward
    monkeypatch.setattr(runner._Recorder, "forward", lambda *a, **k: recorded.append(a[0]) or record(*a, **k))
    plain = start(source, ids, autocast=None).calls  # two windows a batch, one in the last
    assert plain[0] is plain[1] is plain[2] is plain[3] is not plain[4]
    last = list(dict.fromkeys(recorded))[-1]  # two that are alike tell of the third, not of another size
    assert [recorded.count(one) for one in (recorded[0], last)] == [5, 3]

    def with_tokens(_, args, kwargs):
        return args, kwargs | {"tokens": kwargs["input_ids"]}

    source.model.model.register_forward_pre_hook(with_tokens, with_kwargs=True)
    stream = start(source, ids, autocast=None)
    for calls, batch in zip(stream.calls, ids.split(2), strict=True):
        assert all(torch.equal(call.kwargs["tokens"], batch) for call in calls)


@pytest.mark.parametrize("family", ["opt", "opt-post-norm"])
def test_influence_of_attention_is_taken_before_the_mlp(family):
    source = opened(family)
    view, stream = source.block(0), start(source, some_ids(4, 16), autocast=None)
    block, before = view.module, stream.hidden[0]
    moments = measure(view, stream, {"influence"}, step=False)
    args, kwargs, _ = stream.calls[0][0]
    with torch.no_grad():
        if block.do_layer_norm_before:
            middle = before + block.self_attn(block.self_attn_layer_norm(before), *args, **kwargs)[0]
        else:
            middle = block.self_attn_layer_norm(before + block.self_attn(before, *args, **kwargs)[0])
    expected = (1 - torch.cosine_similarity(before, middle, dim=-1)).mean()
    torch.testing.assert_close(moments["influence"].mean[1].float(), expected)


PARALLEL = {"phi", "gpt_neox", "falcon-gqa"}


@pytest.mark.parametrize("family", ["llama", "gpt_neox-sequential", *sorted(PARALLEL)])
def test_influence_of_each_half_is_that_of_what_it_adds(family):
    """Seen in transformers' modules. The MLP adds to what attention left, in parallel blocks to the block's input."""
    source = opened(family)
    view, stream = source.block(1), start(source, some_ids(4, 16), autocast=None)
    before, added = stream.hidden[0], {}
    for paths in (ATTENTION, ("mlp",)):
        member(view.module, paths).register_forward_hook(
            lambda _, __, out, name=paths[0]: added.update({name: (out[0] if isinstance(out, tuple) else out).clone()})
        )
    moment = measure(view, stream, {"influence"}, step=False)["influence"]
    middle = before + added[ATTENTION[0]]
    start_of_mlp = before if family in PARALLEL else middle
    pairs = [(before, middle), (start_of_mlp, start_of_mlp + added["mlp"])]
    expected = torch.stack([(1 - torch.cosine_similarity(*pair, dim=-1)).mean() for pair in pairs])
    torch.testing.assert_close(moment.mean[1:].float(), expected)


@pytest.mark.parametrize("family", ["llama", "opt", "phi"])
def test_the_stream_is_measured_as_a_norm_without_scale_leaves_it(family, monkeypatch):
    """Before the block, between its halves, and after it; by LayerNorms about the mean of a token. In batches."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 32)
    source = opened(family)
    view, stream = source.block(1), start(source, some_ids(6, 16), autocast=None)
    before, added = torch.cat(stream.hidden), []
    hook = member(view.module, ATTENTION).register_forward_hook(lambda _, __, out: added.append(out[0].clone()))
    places = ["stream_input", "stream_middle", "stream_output"]
    moments = measure(view, stream, {*places}, step=True)
    hook.remove()
    assert len(stream.hidden) == len(added) > 1
    for name, x in zip(places, (before, before + torch.cat(added), torch.cat(stream.hidden)), strict=True):
        x = x.flatten(0, 1).double()
        x = x if family == "llama" else x - x.mean(1, keepdim=True)
        x = x / x.square().mean(1, keepdim=True).sqrt()
        assert moments[name].count == len(x)
        torch.testing.assert_close(moments[name].second_moment(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "bloom", "olmo2"])
def test_moments_are_the_same_however_windows_share_batches(family, monkeypatch):
    """Seven windows at once, or three, three and one; every statistic there is."""
    source = opened(family)
    view, statistics = source.block(1), available(source, set(table.STORED))

    def measured(windows: int) -> dict:
        monkeypatch.setattr(runner, "BATCH_TOKENS", windows * 16)
        stream = start(source, some_ids(7, 16), autocast=None)
        assert max(map(len, stream.hidden)) == windows
        return measure(view, stream, statistics, step=False)

    whole, parts = measured(7), measured(3)
    assert whole.keys() == parts.keys() == statistics - {"absolute", "windows"}
    for name, moment in whole.items():
        assert vars(parts[name]).keys() == vars(moment).keys()
        torch.testing.assert_close(vars(parts[name]), vars(moment), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(("kept", "stride"), [(1, 6), (8, 1)])
def test_samples_are_spread_over_all_tokens(kept, stride, monkeypatch):
    """320 tokens, of which so many rows are kept for each of the 48 hidden units; all where there are not as many."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 96)
    monkeypatch.setattr(table, "SAMPLE_ROWS", kept)
    source = opened("opt")
    view, stream = source.block(0), start(source, some_ids(10, 32), autocast=None)
    rows = measure(view, stream, {"mlp_samples"}, step=False)["mlp_samples"].rows
    everything = captured(view, stream, "fc1").float()
    torch.testing.assert_close(rows, everything[::stride])


@pytest.mark.parametrize(
    ("family", "total", "tokens"),
    [
        ("llama", 2**20, 2048),
        ("llama", 2**27, 9362),
        ("llama", 2**40, 32768),
        ("mixtral", 2**27, 5461),
    ],
)
def test_batches_grow_with_the_memory_of_an_accelerator_whatever_is_free_of_it(family, total, tokens, monkeypatch):
    """A stand-in for the device: llama's D = 32, F = 48 take 4 (8 * 32 + 4 * 48) bytes a token; experts have F = 4 D.

    With other batches sums have other bytes, so what another program has taken may not matter.
    Identities have the batch.
    """
    source = opened(family)
    assert runner.batch_tokens(source) == runner.BATCH_TOKENS
    source.device = SimpleNamespace(type="accelerator")
    memory = {id(source.device): (2**10, total)}
    backends = {id(source.device): SimpleNamespace(mem_get_info=lambda device: memory[id(device)])}
    monkeypatch.setattr(torch, "get_device_module", lambda device: backends[id(device)])
    assert runner.batch_tokens(source) == tokens
    assert _precision(source).get("batch_tokens", runner.BATCH_TOKENS) == tokens


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("keep", [None, torch.tensor([0, 3, 7])], ids=["all", "some"])
@torch.no_grad()
def test_logits_are_those_of_the_model_after_all_blocks(blocks, keep, monkeypatch):
    monkeypatch.setitem(CONFIGS, "llama", lambda: transformers.LlamaConfig(**{**GQA, "num_hidden_layers": blocks}))
    source, ids = opened(), some_ids(4, 16)
    stream = start(source, ids, autocast=None)
    for index in range(blocks):
        advance(source.block(index), stream)
    expected = source.model(ids).logits
    torch.testing.assert_close(outputs(source, ids, stream, keep=keep), expected if keep is None else expected[:, keep])


def test_what_nobody_looks_at_is_not_computed():
    """The model's head while windows are embedded; the down projection, where nothing after its input is measured."""
    source, ran = opened(), []
    view = source.block(0)
    for name, module in (("head", source.model.lm_head), ("down", view.module.mlp.down_proj)):
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    stream = start(source, some_ids(4, 16), autocast=None)
    measure(view, stream, {"mlp_hidden", "query"}, step=False)
    assert ran == []
    for statistics, step in (({"influence"}, False), ({"mlp_hidden"}, True)):
        measure(view, stream, statistics, step=step)
        assert ran == ["down"]
        ran.clear()


def test_non_finite_activations_are_named():
    source = opened()
    source.blocks[1].mlp.down_proj.weight.data.fill_(3e38)
    with pytest.raises(rankfold.RankfoldError, match=r"model.layers.1.*NaN or infinite"):
        rankfold.calibrate(source, rankfold.CalibrationData(some_ids(4, 16), "r", "r", 0))


def test_non_finite_activations_inside_a_block_are_named():
    source = opened()
    view, stream = source.block(1), start(source, some_ids(4, 16), autocast=None)
    view.module.mlp.up_proj.weight.data.fill_(3e38)
    with pytest.raises(rankfold.RankfoldError, match=r"activations of model\.layers\.1 \(mlp_hidden\) are NaN"):
        measure(view, stream, {"mlp_input", "mlp_hidden"}, step=False)


def test_non_finite_weights_are_named():
    source = opened()
    source.blocks[2].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(rankfold.RankfoldError, match=r"weight model.layers.2.mlp.up_proj.weight has 1 NaN"):
        rankfold.calibrate(source, rankfold.CalibrationData(some_ids(4, 16), "r", "r", 0))


def test_what_stands_where_a_block_was_lends_its_attributes():
    block = torch.nn.Linear(2, 3)
    stand_in = runner.StandIn(block)
    assert stand_in.out_features == 3 and not list(stand_in.parameters())
    with pytest.raises(AttributeError, match="nothing"):
        stand_in.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["rankfold", "modegpt", "sleb"])
def test_a_model_whose_numbers_are_too_large_for_fp16_is_said_to_compute_nan(name):
    """Its blocks may run in bf16, where they fit; its own norm and head do not."""
    source = rankfold.open_model(tiny_model("llama").half())
    source.autocast = torch.bfloat16
    for parameter in source.blocks[0].mlp.parameters():
        parameter.data.mul_(100)
    with pytest.raises(
        NumericsError, match="computes NaN on the calibration samples: its numbers are too large for float16"
    ):
        rankfold.compress(
            source,
            method=rankfold.make_method(name, sparsity=0.3),
            calibration=replace(tokens(), held_out=some_ids(2, 32)),
        )
