"""Gemma 4: blocks read keys and values of earlier ones, and are handed an embedding of their own of every token.

References are forwards of the whole model, which runs them in one piece.
"""

import math

import pytest
import torch
import transformers as t

import rankfold
from allocations import peak_bytes
from families import GQA, IDS, cached_numbers, some_ids, tokens
from rankfold import CalibrationData, Rankfold
from rankfold.calibration import runner
from rankfold.compression.budget import rank_options
from rankfold.compression.duration import timed
from rankfold.compression.importance import shares
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.errors import UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes

BLOCKS = 6  # the last two read keys and values of the third and the fourth
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def config_of(blocks: int = BLOCKS, *, each: int = 8, readers: int = 2) -> t.Gemma4TextConfig:
    return t.Gemma4TextConfig(
        **(GQA | IDS | {"num_hidden_layers": blocks, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8}),
        **{"hidden_size_per_layer_input": each, "vocab_size_per_layer_input": GQA["vocab_size"]},
        **{"layer_types": ["sliding_attention", "full_attention"] * (blocks // 2), "num_kv_shared_layers": readers},
        use_double_wide_mlp=True,
    )


@pytest.fixture
def dense():
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config_of()).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.fixture(autouse=True)
def several_batches(monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 128)


def opened(model):
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    return source


def test_moments_are_of_the_models_own_forward(dense):
    data, seen = tokens(), {}
    source = opened(dense)
    moments = rankfold.calibrate(source, data, statistics={"mlp_hidden"})
    for index, block in enumerate(dense.model.layers):
        block.mlp.down_proj.register_forward_pre_hook(
            lambda _, args, index=index: seen.setdefault(index, []).append(args[0].flatten(0, 1).double())
        )
    with torch.no_grad():
        dense(data.ids)
    for index in range(BLOCKS):
        (rows,) = seen[index]
        found = moments[index]["mlp_hidden"].second_moment()
        torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["rankfold", "modegpt", "latentllm", "flap"])
def test_what_is_planned_is_what_comes_out(dense, method, tmp_path):
    folder = tmp_path / "small"
    how = {"method": method, "calibration": tokens(), "output": folder, "rank_multiple": 2}
    found = rankfold.compress(opened(dense), 0.15, **how)
    small, plan = rankfold.load(folder), found.plan
    assert sum(p.numel() for p in small.parameters()) == plan.parameters_after < plan.parameters
    assert {module.module for module in plan.modules} <= {"mlp", "up", "down", "gate"}
    assert plan.kv_bytes_per_token == plan.kv_bytes_per_token_after == cache_bytes(small) == 4 * cached_numbers(dense)
    ids = some_ids()
    given = {"attention_mask": torch.ones_like(ids), **GREEDY}
    assert torch.equal(small.generate(ids, **given), small.generate(ids, use_cache=False, **given))
    held_out, said = tokens().held_out, found.record["held_out"]
    with torch.no_grad():
        for model, perplexity in ((dense, said["perplexity_dense"]), (small, said["perplexity"])):
            assert math.log(perplexity) == pytest.approx(model(held_out, labels=held_out).loss.item(), abs=1e-3)


def test_costs_are_divergences_of_the_whole_model_with_one_module_compressed(dense):
    """Also of a block whose keys and values, made of what is tried before it, later ones read."""
    source, text = opened(dense), tokens()
    options = {"rank_multiple": 2, "residual_correction": False, "norm_aware": False}
    method = Rankfold(sparsity=0.2, **options)
    units, averages = shares(rank_options(source, method), method)
    costs = measure_kl_sensitivity(source, method, text, units, averages)
    ids = text.held_out[:4]
    with torch.no_grad():
        expected = dense(ids).logits.log_softmax(-1)
    for unit in units:
        tried = min(unit.ranks[:-1], key=lambda rank: abs(rank / unit.ranks[-1] - (1 - averages[unit.key])))
        sizes = {other.block: other.dense for other in units}
        share = (1 - tried / unit.ranks[-1]) * sizes[unit.block] / sum(sizes.values())
        others = tuple(block for block in range(BLOCKS) if block != unit.block)
        alone = Rankfold(modules={"mlp": share}, allocation="uniform", exclude_blocks=others, **options)
        assert rankfold.plan(source, method=alone).ranks(unit.block)["mlp"] == tried
        small = rankfold.compress(source, method=alone, calibration=text).model
        with torch.no_grad():
            got = small(ids).logits.log_softmax(-1)
        divergence = (expected.exp() * (expected - got)).sum(-1).mean().item()
        assert costs[unit.key][tried] == pytest.approx(divergence, rel=5e-3, abs=1e-7), unit.key


ASKED = {"gradients": ("llm-pruner", {}), "more gradients": ("obd", {}), "latency": ("modegpt", {"budget": "latency"})}


@pytest.mark.parametrize("asked", ASKED)
def test_what_runs_single_blocks_is_refused_in_one_sentence(dense, asked):
    method, options = ASKED[asked]
    with pytest.raises(UnsupportedModelError) as refused:
        rankfold.compress(dense, 0.1, method=method, calibration=tokens(), rank_multiple=2, **options)
    assert str(refused.value) == (
        f"blocks of {type(dense).__name__} hand keys and values on to later ones, so none runs by itself, as gradients "
        "and latencies are measured; use a method, an allocation and a budget without them"
    )


@pytest.mark.parametrize("asked", ["gradients", "more gradients"])
def test_where_no_block_reads_those_of_another_single_blocks_are_run(asked):
    """As in the larger models, whose blocks are called with an empty place for them all the same."""
    dense = t.AutoModelForCausalLM.from_config(config_of(4, readers=0))
    method, options = ASKED[asked]
    found = rankfold.compress(dense, 0.05, method=method, calibration=tokens(), rank_multiple=2, **options)
    assert sum(p.numel() for p in found.model.parameters()) == found.plan.parameters_after < found.plan.parameters


def test_keys_and_values_that_nobody_reads_later_do_not_wait_in_memory():
    data = CalibrationData(some_ids(96, 64), "some", "some", 0)
    models = [t.AutoModelForCausalLM.from_config(config_of(8, readers=readers)) for readers in (2, 0)]
    reading, apart = (rankfold.plan(model, 0.2, calibration=data).peak_memory_bytes for model in models)
    kept = 4 * data.ids.numel() * 2 * cached_numbers(models[1]) // 8  # bytes, of two blocks
    assert reading - apart > 0.9 * kept


@pytest.mark.parametrize("options", [{"tune": "all"}, {"tune": "lora"}, {"blockwise": True}], ids=str)
def test_it_is_recovered(dense, options, tmp_path, monkeypatch):
    """The score of the dense model is that of its own forward: asked for one logit, it keeps one state."""
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: False)
    dense.save_pretrained(tmp_path / "dense")
    small = rankfold.compress(dense, 0.15, calibration=tokens(), output=tmp_path / "small", rank_multiple=2).output
    sizes = {"tokens": 512, "max_length": 32, "batch_tokens": 128}
    found = rankfold.recover(
        small, tmp_path / "dense", calibration=tokens(), output=tmp_path / "out", **sizes, **options
    )
    held_out, (said,) = tokens().held_out, found.record["recovery"]["held_out"].values()
    with torch.no_grad():
        expected = dense(held_out, labels=held_out).loss.item()
    assert math.log(said["perplexity_dense"]) == pytest.approx(expected, abs=1e-3)


def test_removing_blocks_is_refused_in_one_line(dense):
    with pytest.raises(UnsupportedModelError, match="cannot be built with fewer blocks"):
        rankfold.compress(dense, 0.2, method="shortgpt", calibration=tokens())


def test_the_time_of_a_run_is_estimated_by_a_block_that_reads_no_other(dense):
    source, data = opened(dense), tokens()
    method = rankfold.make_method("modegpt", sparsity=0.1, rank_multiple=2)
    plan = rankfold.plan(source, method=method, calibration=data)
    assert (timed(plan, source, data.describe(), "sequential").seconds or 0) > 0


def test_the_estimate_of_memory_has_what_waits_for_later_blocks(tmp_path):
    model = t.AutoModelForCausalLM.from_config(config_of(8, each=64))
    model.save_pretrained(tmp_path / "dense", max_shard_size="300KB")
    source, found = rankfold.open_model(tmp_path / "dense", device="cpu"), []
    data = CalibrationData(some_ids(96, 64), "some", "some", 0, held_out=some_ids(4, 64))
    options = {"method": "modegpt", "rank_multiple": 2, "calibration": data, "output": tmp_path / "small"}
    peak = peak_bytes(lambda: found.append(rankfold.compress(source, 0.2, **options)))
    assert 0.9 * peak <= found[0].plan.peak_memory_bytes <= 1.3 * peak
