"""Methods that read the gradient of the loss: what their run does, and FWSVD against the SVD of its definition.

Which units they choose is in test_slicing_methods.py.
"""

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, UP, blocks_of, member, weight_of
from families import opened, tiny_model, tokens
from gradients import stock_gradients
from rankfold import make_method
from rankfold.comparison.grid import Form
from rankfold.compression import importance as scores
from rankfold.compression import plan as planning
from rankfold.compression.budget import rank_options
from rankfold.compression.plan import allocate_ranks, build_plan
from rankfold.errors import OptionError

NAMES = ["obd", "llm-pruner", "kobd", "llm-surgeon", "fwsvd"]


def method_for(name: str, **options):
    return make_method(name, **{"sparsity": 0.3, "rank_multiple": 2} | options)


def fisher(family: str) -> list[nn.Module]:
    """Blocks whose parameters hold the diagonal of the empirical Fisher: squared gradients of each sequence, summed."""
    model, holder = tiny_model(family), tiny_model(family)
    for held in holder.parameters():
        held.data.zero_()
    for row in tokens().ids:
        model.zero_grad()
        stock_gradients(model, row[None], {})
        for held, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            held.data += 0 if parameter.grad is None else parameter.grad.square()
    return list(blocks_of(holder))


def projections(block: nn.Module) -> dict[str, Tensor]:
    """``(out, in)`` by name of the module, of families whose projections are not fused, and of GPT-2's fused ones."""
    attention = member(block, ATTENTION)
    found = {"o": member(attention, OUTPUT), "up": member(block, UP), "down": member(block, DOWN)}
    found |= {"gate": block.mlp.gate_proj} if hasattr(member(block, ("mlp",)), "gate_proj") else {}
    if hasattr(attention, "c_attn"):
        parts = zip("qkv", weight_of(attention.c_attn).chunk(3), strict=True)
    else:
        parts = [(name, weight_of(getattr(attention, f"{name}_proj"))) for name in "qkv"]
    return {name: weight_of(layer) for name, layer in found.items()} | dict(parts)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_fwsvd_is_the_svd_of_the_weight_with_its_columns_weighed(family):
    """``svd_r(W diag(I)^(1/2)) diag(I)^(-1/2)``, ``I`` the Fisher of a column.

    OPT has hidden units that never fire, where any column would do.
    """
    names = ("q", "v", "o", *(("gate",) if family == "llama" else ()), "up", "down")
    source, method = opened(family), method_for("fwsvd", modules=dict.fromkeys(names, 0.4))
    model, plan = (
        rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model,
        rankfold.plan(source, method=method),
    )
    for index, importance in enumerate(fisher(family)):
        block, dense = blocks_of(model)[index], projections(blocks_of(tiny_model(family))[index])
        attention = member(block, ATTENTION)
        layers = {name: getattr(attention, f"{name}_proj") for name in "qvo"}
        layers |= {"up": member(block, UP), "down": member(block, DOWN)}
        layers |= {"gate": block.mlp.gate_proj} if "gate" in names else {}
        assert set(layers) == set(names)
        for name, layer in layers.items():
            size = projections(importance)[name].double().sum(0).sqrt()
            U, S, V = torch.linalg.svd(dense[name].double() * size, full_matrices=False)
            rank = plan.ranks(index)[name]
            with torch.no_grad():
                found = (layer(torch.eye(len(size))) - layer(torch.zeros(1, len(size)))).T
            counts = size > 0
            wanted = ((U[:, :rank] * S[:rank]) @ V[:rank] / size)[:, counts]
            assert counts.sum() > 0.8 * len(size)
            assert (found[:, counts] - wanted).norm() < 2e-4 * wanted.norm() < (wanted - dense[name][:, counts]).norm()


@pytest.mark.parametrize("family", ["phi3", "falcon-gqa", "mixtral", "qwen3"])
def test_fwsvd_does_what_was_planned(family):
    source, method = opened(family), method_for("fwsvd", sparsity=0.1)
    model, plan = (
        rankfold.compress(source, method=method, calibration=tokens()).model,
        rankfold.plan(source, method=method),
    )
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    assert plan.sparsity >= 0.1


def test_fused_and_separate_projections_are_weighed_alike():
    """A Phi-3 is a Llama whose projections are fused: q, k and v have the same Fisher, and so the same factors."""
    llama, phi = tiny_model("llama"), tiny_model("phi3")
    for a, b in zip(blocks_of(llama), blocks_of(phi), strict=True):
        fused = torch.cat([getattr(a.self_attn, f"{name}_proj").weight for name in "qkv"])
        b.self_attn.qkv_proj.weight.data = fused.detach().clone()
        b.self_attn.o_proj.weight.data = a.self_attn.o_proj.weight.detach().clone()
        both = torch.cat([a.mlp.gate_proj.weight, a.mlp.up_proj.weight])
        b.mlp.gate_up_proj.weight.data = both.detach().clone()
        b.mlp.down_proj.weight.data = a.mlp.down_proj.weight.detach().clone()
    phi.model.embed_tokens.weight.data = llama.model.embed_tokens.weight.detach().clone()
    phi.lm_head.weight.data = llama.lm_head.weight.detach().clone()
    found = []
    for model in (llama, phi):
        source = rankfold.open_model(model, device="cpu")
        source.autocast = None
        small = rankfold.compress(
            source, method=method_for("fwsvd", modules=dict.fromkeys("qkv", 0.4)), calibration=tokens(), mode="one-pass"
        ).model
        found.append([blocks_of(small)[1].self_attn.get_submodule(f"{name}_proj") for name in "qkv"])
    for a, b in zip(*found, strict=True):
        x = torch.eye(32)
        torch.testing.assert_close(a(x), b(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["obd", "llm-surgeon", "fwsvd"])
def test_resumed_runs_find_the_same_gradients(name, tmp_path, monkeypatch):
    """Killed in the sweep: what it measured is read again, the rest measured; the bytes are those of a whole run."""
    source, method, sweep, ends = opened("llama"), method_for(name), scores.sweep, []
    whole = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "whole").output

    def dies(*args):
        for index, moments in sweep(*args):
            if index == 0:
                raise KeyboardInterrupt
            yield index, moments

    def counted(*args):
        ends.append([index for index, _ in sweep(*args)])
        return sweep(*args)

    monkeypatch.setattr(scores, "sweep", dies)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed")
    kept = sorted(path.name for path in (tmp_path / "killed.partial" / "gradients").glob("block-*"))
    assert kept == ["block-00001.safetensors", "block-00002.safetensors"]
    before = [(tmp_path / "killed.partial" / "gradients" / name).stat().st_mtime_ns for name in kept]
    monkeypatch.setattr(scores, "sweep", counted)
    monkeypatch.setattr(
        scores.MomentStore, "finish", lambda store: before.extend((store.folder / n).stat().st_mtime_ns for n in kept)
    )
    resumed = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed").output
    assert ends == [[2, 1, 0]] and before[:2] == before[2:4]
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (resumed / path.name).read_bytes()
    assert not (resumed / "gradients").exists()


def test_moments_hold_no_gradients_and_say_so():
    source = opened("llama")
    store = rankfold.calibrate(source, tokens())
    for name in NAMES:
        with pytest.raises(
            OptionError, match="gradients are measured on text, which moments do not hold; give .* reads no gradients"
        ):
            rankfold.compress(source, method=method_for(name), moments=store)


@pytest.mark.parametrize("name", ["magnitude", *NAMES])
def test_the_plan_says_how_much_goes_backwards(name):
    source, method = opened("llama"), method_for(name)
    calibration = tokens(40).describe() | {"max_length": 1024, "num_samples": 40, "tokens": 40 * 1024}
    plan = build_plan(source, method, allocate_ranks(rank_options(source, method), method), {}, calibration)
    console = Console(width=200, file=io.StringIO())
    console.print(plan.summary())
    assert plan.gradient_windows == (None if name == "magnitude" else 8)  # 8,192 tokens
    assert ("samples of the one backward pass" in console.file.getvalue()) == (name != "magnitude")


def test_the_estimate_of_memory_holds_what_is_measured_in_a_block(monkeypatch):
    """Where the backward pass is the peak: as many fp64 numbers as the layers have weights, and half as many fp32."""
    source, method = opened("llama"), method_for("obd")
    long = tokens(16).describe() | {"num_samples": 1, "max_length": 2**20, "tokens": 2**20, "held_out": 0}
    found = []
    for _ in range(2):
        plan = build_plan(source, method, allocate_ranks(rank_options(source, method), method), {}, long)
        found.append(plan.peak_memory_bytes)
        monkeypatch.setattr(planning, "numbers", lambda view, names: 0)
    weights = sum(p.numel() for p in source.blocks[0].parameters() if p.dim() == 2)
    assert found[0] - found[1] == 8 * weights * 5 // 4


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_gives_them_text(name):
    cell = Form(name).at(0.3)
    assert cell.mode == "one-pass" and not cell.takes_moments(opened("llama").meta_blocks())


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"joint": "qk"},
            "precondition=fisher weighs the columns of one layer, joint=qk fits two; use joint=auto or none",
        ),
        ({"split_head": True, "junction": "left"}, "precondition=fisher and split_head=true exclude each other"),
        ({"shared_qkv": True}, "precondition=fisher weighs q, k and v each by itself, without shared_qkv=true"),
        ({"sparse": 0.2}, "sparse > 0 fits the root covariance; use precondition=rootcov, got 'fisher'"),
    ],
)
def test_forms_that_weighed_columns_do_not_fit_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make_method("fwsvd", **options)


def test_weighed_columns_make_all_forms_local():
    source = opened("opt")
    model = rankfold.compress(
        source, method=make_method("latentllm", precondition="fisher", rank_multiple=2), calibration=tokens()
    ).model
    assert model.config.quantization_config.fields["options"]["precondition"] == "fisher"
    assert make_method("latentllm", precondition="fisher").joint_forms(source.meta_block(0)) == set()
