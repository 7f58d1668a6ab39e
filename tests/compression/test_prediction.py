"""Plans of models that are only a config: what shapes give, and what a card's rates make of counted operations."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as t
from torch.utils.flop_counter import FlopCounterMode

import rankfold
from families import ANY_MODEL, CONFIGS, opened
from rankfold.calibration.runner import MOST_BATCH_TOKENS, batch_tokens
from rankfold.calibration.statistics import last_place
from rankfold.cli import main
from rankfold.compression import cards, passes
from rankfold.compression.cards import Card, find_card
from rankfold.compression.duration import _work
from rankfold.compression.prediction import rates_on
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.methods import make_method
from rankfold.methods.work import ROUTINES, Work, times
from rankfold.models.outline import open_outline

# As wide as models of 7 and 70 billion parameters; four blocks of theirs, which are all alike.
SEVEN = t.LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=4,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
SEVENTY = t.LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=4,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
# A billion of everything a second, so that seconds are what is counted, in billions.
PLAIN = Card("plain", 80, dict.fromkeys(("bf16", "gram", "fp32", "fp64", "eigh"), 1e-3), 1.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral", "gemma3"])
def test_a_config_gives_the_ranks_and_sizes_of_the_model(family):
    method = make_method("modegpt", sparsity=0.3, rank_multiple=2, allocation="uniform")
    of_config = rankfold.plan(CONFIGS[family](), method=method, gpu="h100", dtype="float32").to_dict()
    of_model = rankfold.plan(opened(family), method=method).to_dict()
    same = ("modules", "counted_weights", "removed_weights", "parameters", "parameters_after", "bytes", "bytes_after")
    assert [key for key in (*same, "kv_bytes_per_token_after", "budget") if of_config[key] != of_model[key]] == []
    assert "hardware" not in of_model and of_config["hardware"]["allocation"] == "uniform"


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_a_forward_takes_the_operations_that_torch_counts(family):
    source, length = opened(family), 24
    ids = torch.zeros(1, length, dtype=torch.long)
    blocks = source.architecture.blocks
    source.model.set_attn_implementation("eager")  # of others the counter knows nothing
    if source.block(0).experts:
        source.model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        source.model(ids, use_cache=False)
    view, found = source.block(0), counter.get_flop_counts()
    name = next(key for key in found if key.endswith(f"{blocks}.0"))
    sent = view.attention.heads * view.attention.head_dim
    seen_by_all = (
        4 * sent * length / 2
    )  # queries times keys and attention times values, which torch counts without a mask
    counted = sum(found[name].values()) / length - seen_by_all
    assert passes.forward(view, length)["bf16"] == pytest.approx(counted, rel=1e-9)


def test_a_forward_that_is_left_early_takes_what_comes_before():
    view = opened("llama").block(0)
    D, F, N, K = 32, 48, 8, 2
    attends = 4 * D * 10 / 2
    before_output = 2 * (D * D + 2 * D * K * N)
    assert passes.forward(view, 10, "projections") == {"bf16": before_output}
    assert passes.forward(view, 10, "attention") == {"bf16": before_output + attends}
    assert passes.forward(view, 10, "mlp") == {"bf16": before_output + 2 * (D * D + 2 * D * F) + attends}


def test_moments_take_half_of_a_symmetric_product_and_all_of_another():
    view = opened("llama").block(0)
    assert passes.moments(view, {"mlp_hidden"}) == {"gram": 48 * 48}
    assert passes.moments(view, {"mlp_feedback", "attention_feedback"}) == {"fp32": 2 * 32 * 48 + 2 * 32 * 32}
    assert passes.moments(view, {"windows", "attention_input"}) == {"gram": 32 * 32}


def test_a_compression_beside_the_dense_stream_takes_one_pass_more():
    """The default: attention's statistics, its output's, the MLP's; then the dense block, and the compressed one.

    Attention does not run again for the MLP's and in the last one.
    """
    view, method = opened("llama").block(0), make_method("rankfold", sparsity=0.3, rank_multiple=2)
    ranks = {"qk": 4, "vo": 4, "mlp": 24}
    steps = method.stages(view, ranks)
    assert [last_place(step.statistics) for step in steps] == ["projections", "attention", "mlp"]
    found = passes.compression(view, method, ranks, 10, "sequential")
    parts = [passes.forward(view, 10, until)["bf16"] for until in ("projections", "attention", "mlp", "end", "end")]
    assert found["bf16"] == sum(parts) - 2 * passes.forward(view, 10, "attention")["bf16"]
    assert found["gram"] == sum(passes.moments(view, step.statistics)["gram"] for step in steps)


def test_routines_take_what_their_operations_take():
    assert PLAIN.seconds_for(Work({("product", 100): 3.0})) == pytest.approx(3 * 2 * 100**3 / 1e9)
    assert PLAIN.seconds_for(Work({("calls", 1024): 2.0})) == pytest.approx(2 * 1024 * 1e-6)
    assert PLAIN.seconds_for(Work({("pass", 100): 1.0})) == pytest.approx(16 * 100**2 / 1e9)
    elimination = 1.04 * 100**3 / 1e9 + 50 * 1.6e-9 * 100  # the device's part, and half of the units removed on the CPU
    assert PLAIN.seconds_for(Work({("elimination", 100): 2.0})) == pytest.approx(2 * elimination)
    slow = replace(PLAIN, solver_ms=7.0)
    assert slow.seconds_for(Work({("eigh", 4): 5.0})) == pytest.approx(5 * 0.007)


def test_rates_of_a_card_are_operations_over_its_speed():
    """Accelerators share all but reading."""
    source, method = (
        open_outline(CONFIGS["llama"](), dtype=torch.float32),
        make_method("rankfold", sparsity=0.3, rank_multiple=2),
    )
    plan = rankfold.plan(CONFIGS["llama"](), method=method, gpu="80GB")
    one, two = (rates_on(PLAIN, n, source, method, plan, "sequential", 10) for n in (1, 2))
    view, D, V = source.meta_block(1), 32, 96
    stages = passes.compression(view, method, plan.ranks(1), 10, "sequential")
    alone = passes.passes(view, [method.alone(view).statistics(view)], 10, step=True)
    assert one.read == 4 * sum(p.numel() for p in view.module.parameters()) / 1e9 == two.read
    expected = (passes.forward(view, 10).total(), stages.total(), 0.0, alone.total(), 2 * V * D)
    assert one[1:] == pytest.approx([operations / 1e9 for operations in expected])
    assert two[1:] == pytest.approx([seconds / 2 for seconds in one[1:]])


def test_every_routine_that_is_counted_has_a_time():
    assert {*cards.OPERATIONS, "pass", "calls"} >= {*ROUTINES}


def test_a_card_is_found_by_name_or_by_the_nearest_memory():
    assert find_card("A100").gigabytes == 40
    found = find_card("24 GB")
    assert (found.name, found.gigabytes) == ("rtx4090", 24)
    assert (find_card("96GB").name, find_card("96GB").gigabytes) == ("h100", 96)
    for wrong in ("80", "0GB", "v100"):
        with pytest.raises(OptionError, match="gpu takes a size such as 80GB, or one of h100, "):
            find_card(wrong)


def test_no_rate_of_the_table_claims_to_be_measured_without_a_record():
    assert not any(card.is_measured for card in cards.known_cards().values())


def test_accelerators_share_samples_and_passes_but_no_decomposition():
    one, eight = (rankfold.plan(SEVENTY, 0.3, method="modegpt", gpu="80GB", gpus=n) for n in (1, 8))
    tokens, held_out = 128 * 2048, 8 * 2048
    streams = 2 * 8192 * (tokens + 3 * held_out)  # bytes, in bf16
    assert one.peak_memory_bytes - eight.peak_memory_bytes == pytest.approx(streams * 7 / 8, rel=1e-6)
    assert eight.seconds < one.seconds < 8 * eight.seconds
    assert one.hardware["advice"] is None and one.modules == eight.modules


def test_hidden_states_in_host_memory_leave_a_batch_of_each_stream_on_the_accelerator():
    """Three streams of the default, one of MoDeGPT."""
    # kept: what attention mixes of the samples to fit to; of held-out ones it is on the device either way
    for method, streams, kept in (("rankfold", 3, 1), ("modegpt", 1, 0)):
        here, there = (rankfold.plan(SEVEN, 0.3, method=method, gpu="80GB", offload=where) for where in (None, "cpu"))
        batch = 10 * 10**9 // (4 * (8 * 4096 + 4 * 11008))  # tokens; their activations take an eighth of the memory
        saved = 2 * 4096 * (streams * (128 * 2048 - batch) + kept * 128 * 2048)  # bytes, in bf16
        assert here.peak_memory_bytes - there.peak_memory_bytes == pytest.approx(saved, rel=1e-6)


def test_what_does_not_fit_is_one_line_with_what_to_do():
    size = f"{0.9 * rankfold.plan(SEVEN, 0.3, gpu='16GB').peak_memory_bytes / 1e9:.1f}GB"
    small = rankfold.plan(SEVEN, 0.3, gpu=size)
    assert small.hardware["advice"].startswith(
        f"{small.peak_memory_bytes / 1e9:.0f} GB do not fit on {size[:-2]} GB: keep hidden states in host "
    )
    assert "offload='cpu'" in small.hardware["advice"]
    assert rankfold.plan(SEVEN, 0.3, gpu=size, offload="cpu").hardware["advice"] is None
    assert "take method='modegpt', which" in rankfold.plan(SEVENTY, 0.3, gpu="36GB").hardware["advice"]
    lean = rankfold.plan(SEVENTY, 0.3, method="modegpt", gpu="36GB").peak_memory_bytes / 1e9
    advice = rankfold.plan(SEVENTY, 0.3, gpu=f"{lean - 2:.1f}GB").hardware["advice"]
    assert "width, and keep hidden states" in advice
    assert "device='cpu'" in rankfold.plan(SEVENTY, 0.3, gpu="9GB").hardware["advice"]


def test_every_method_is_planned_or_chooses_by_numbers(subtests):
    refused = set()
    for name in ANY_MODEL:
        with subtests.test(name):
            try:
                plan = rankfold.plan(CONFIGS["llama"](), method=name, gpu="80GB", num_samples=16)
            except OptionError as error:
                assert "chooses what to remove by numbers" in str(error)
                refused.add(name)
            else:
                assert plan.seconds > 0 and plan.peak_memory_bytes > 0 and plan.removed_weights > 0
    assert refused == {"shortgpt", "sleb", "zs-svd"}


def test_ranks_of_an_allocation_in_place_of_another_are_its_own():
    """Only what is measured may remove a whole module."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = t.LlamaConfig(**shape, num_hidden_layers=4, vocab_size=96, max_position_embeddings=64)
    measured, uniform = (
        rankfold.plan(small, method=rankfold.Rankfold(sparsity=0.5, rank_multiple=16, **more), gpu="80GB")
        for more in ({"allow_module_removal": True}, {"allocation": "uniform"})
    )
    assert measured.hardware["allocation"] == "uniform" and measured.modules == uniform.modules


def test_the_largest_model_there_is_takes_seconds():
    plan = rankfold.plan(t.DeepseekV3Config(dtype="bfloat16"), 0.3, gpu="80GB")
    assert 6.7e11 < plan.parameters < 6.72e11 and plan.sparsity == pytest.approx(0.3, abs=1e-3)
    assert plan.experts["of_a_block"] == 256 and plan.seconds > 0


def test_accelerators_share_experts_and_each_has_what_all_samples_send_to_them():
    config = t.MixtralConfig(num_hidden_layers=2, dtype="bfloat16")
    method = make_method("modegpt", sparsity=0.3, modules=("experts",))
    plans = [rankfold.plan(config, method=method, gpu="80GB", gpus=8, num_samples=n) for n in (256, 512)]
    more, width, experts = 256 * 2048, 4096, 8  # tokens; a stream of an eighth of them, and rows of all
    peaks = [plan.peak_memory_bytes for plan in plans]
    assert peaks[1] - peaks[0] == pytest.approx(more * (2 * width / 8 + 2 * width + 4 * experts), rel=0.03)
    source = open_outline(config)
    one, eight = (_work(source, method, plans[0], n) for n in (1, 8))
    assert one and eight == times(one, 1 / 8)


def test_the_command_takes_a_folder_without_weights(tmp_path, capsys, monkeypatch):
    SEVEN.save_pretrained(tmp_path / "seven")
    line = ["plan", str(tmp_path / "seven"), "--sparsity", "0.3", "--gpu", "80GB", "--gpus", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["rankfold", *line])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    expected = rankfold.plan(SEVEN, 0.3, gpu="80GB", gpus=8).to_dict()
    assert found["model"] == "seven" and found["seconds"] == expected["seconds"]
    assert found["hardware"] == expected["hardware"] | {"allocation": "uniform"}


def test_a_command_that_gives_what_shapes_do_not_read_is_refused(tmp_path, capsys, monkeypatch):
    for line, message in (
        ("--gpus 2", "--gpus would be ignored without --gpu"),
        ("--gpu 80GB --seed 1", "--gpu plans by the shapes of a config alone, --seed would be ignored"),
        ("--gpu 80GB --calibration ptb", "--calibration would be ignored"),
        ("--gpu 80GB --shards 3", "--shards would be ignored"),
    ):
        monkeypatch.setattr(sys, "argv", ["rankfold", "plan", str(tmp_path), *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_forward_takes_what_the_memory_of_the_card_has_room_for():
    outline = open_outline(SEVEN)
    outline.memory_bytes = 16 * 10**9
    assert batch_tokens(outline) == 2 * 10**9 // (4 * (8 * 4096 + 4 * 11008))
    outline.memory_bytes = 10**12
    assert batch_tokens(outline) == MOST_BATCH_TOKENS


def test_the_summary_says_where_and_by_what(capsys):
    from rich.console import Console

    Console(width=200).print(rankfold.plan(SEVEN, 0.3, gpu="24GB", gpus=2).summary())
    text = capsys.readouterr().out
    assert "time on 2 x rtx4090 (estimate)" in text and "of 24 GB" in text
    assert "Ranks are those of a uniform allocation" in text and "Rates of rtx4090 are predicted" in text


def test_what_shapes_do_not_have_is_refused(tmp_path):
    config = CONFIGS["llama"]()
    for wrong, message in (
        ({"calibration": ["text"]}, "goes by shapes alone, so calibration has no effect"),
        ({"device": "cpu"}, "so device has no effect"),
        ({"gpus": 0}, r"gpus must be in \[1, 128\]"),
        ({"gpus": 129}, r"gpus must be in \[1, 128\]"),
        ({"method": "sleb"}, "chooses what to remove by numbers of the model"),
        ({"budget": "latency:context=64"}, "a budget in time is measured on weights"),
    ):
        with pytest.raises(OptionError, match=message):
            rankfold.plan(config, **{"gpu": "80GB"} | wrong)
    with pytest.raises(OptionError, match="LlamaConfig has no weights; give gpu='80GB'"):
        rankfold.plan(config)
    with pytest.raises(OptionError, match="gpus is of a plan for accelerators that are not here, got 2"):
        rankfold.plan(opened("llama"), gpus=2)
    with pytest.raises(CheckpointError, match="has no readable config.json"):
        rankfold.plan(tmp_path, gpu="80GB")
    with pytest.raises(CheckpointError, match="no model at 'nowhere': expected a folder, .* or a hub id"):
        rankfold.plan("nowhere", gpu="80GB")


def test_a_quantised_config_stands_for_its_model_where_its_weights_can_be_de_quantised(caplog):
    config = CONFIGS["llama"]()
    config.quantization_config = {"quant_method": "fp8"}
    assert len(open_outline(config)) == 3 and "de-quantised" in caplog.text
    assert config.quantization_config["quant_method"] == "fp8"  # the caller's
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match="already compressed or quantised"):
        open_outline(config)


def test_the_page_of_large_models_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    SEVEN.save_pretrained(tmp_path / "only-a-config")
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^rankfold plan .*$", page, re.M):
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, None)
    assert capsys.readouterr().out.count("peak memory of an accelerator") == 3
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    assert float(capsys.readouterr().out.split()[0]) > 2e10
