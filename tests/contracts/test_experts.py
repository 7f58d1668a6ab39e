"""Experts: what is installed, against dense code on what transformers' own modules are called with.

Nothing of rankfold is used for the references.

Shape legend: E experts, n tokens, m tokens of one expert, D model width, F hidden width of an expert, R kept width.
"""

import json
from typing import NamedTuple

import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from torch import Tensor, nn

import rankfold
from families import GQA, HEADS_OF_MAMBA, HEADS_OF_STATES, IDS, SHAPE, cached_numbers, some_ids, tiny_model
from rankfold import CalibrationData, MoDeGPT, Rankfold
from rankfold.compression.replace import replace
from rankfold.errors import OptionError, UnsupportedModelError

E, TOP, F = 6, 2, 24
RIDGE = 1e-2  # large enough that the fit shows whether it is there
CLOSE = 2e-3  # moments are products in fp32
NARROW = {**GQA, "intermediate_size": F}
BESIDE_SHARED = {
    **{"n_routed_experts": E, "num_experts_per_tok": TOP, "moe_intermediate_size": F, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
LATENT = {
    **{**SHAPE, "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
BESIDE_SHARED_OF_TYPES = {key: value for key, value in BESIDE_SHARED.items() if key != "first_k_dense_replace"}
CONFIGS = {
    "mixtral": lambda: t.MixtralConfig(**NARROW, num_local_experts=E, num_experts_per_tok=TOP),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(**_qwen(), shared_expert_intermediate_size=40, mlp_only_layers=[1]),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**_qwen(), head_dim=8, norm_topk_prob=True),
    "olmoe": lambda: t.OlmoeConfig(**{**NARROW, **IDS}, num_experts=E, num_experts_per_tok=TOP),
    "granitemoe": lambda: t.GraniteMoeConfig(**NARROW, num_local_experts=E, num_experts_per_tok=TOP),
    "gpt_oss": lambda: t.GptOssConfig(
        **NARROW, head_dim=8, num_local_experts=E, num_experts_per_tok=TOP, sliding_window=8, **IDS
    ),
    "llama4_text": lambda: t.Llama4TextConfig(
        **{**NARROW, "intermediate_size_mlp": 48, "num_local_experts": E, "num_experts_per_tok": TOP, "head_dim": 8},
        **{"moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8, "floor_scale": 4, **IDS},
    ),
    "deepseek_v2": lambda: t.DeepseekV2Config(**LATENT, **BESIDE_SHARED, topk_method="group_limited_greedy"),
    "deepseek_v3": lambda: t.DeepseekV3Config(**LATENT, **BESIDE_SHARED),
    "glm4_moe_lite": lambda: t.Glm4MoeLiteConfig(**LATENT, **BESIDE_SHARED_OF_TYPES),
    "glm4_moe": lambda: t.Glm4MoeConfig(**GQA, **BESIDE_SHARED, head_dim=8, use_qk_norm=False, attention_bias=True),
    "dots1": lambda: t.Dots1Config(**GQA, **BESIDE_SHARED, head_dim=8),
    "ernie4_5_moe": lambda: t.Ernie4_5_MoeConfig(
        **GQA,
        **{"moe_num_experts": E, "moe_k": TOP, "moe_intermediate_size": F, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "head_dim": 8, "use_bias": True},
    ),
    "minimax_m2": lambda: t.MiniMaxM2Config(
        **NARROW, head_dim=8, rotary_dim=4, num_local_experts=E, num_experts_per_tok=TOP
    ),
    "flex_olmo": lambda: t.FlexOlmoConfig(**NARROW, **IDS, num_experts=E, num_experts_per_tok=TOP),
    "exaone_moe": lambda: t.ExaoneMoeConfig(
        **_qwen(),
        **{"head_dim": 8, "num_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **IDS},
    ),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **_qwen(),
        **HEADS_OF_STATES,
        **{"shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "head_dim": 8},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(
        **NARROW,
        **HEADS_OF_MAMBA,
        **{"num_local_experts": E, "num_experts_per_tok": TOP, "shared_intermediate_size": 40},
        position_embedding_type="rope",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "lfm2_moe": lambda: t.Lfm2MoeConfig(**_qwen(), num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]),
    "gemma4_text": lambda: t.Gemma4TextConfig(
        **GQA,
        **{"enable_moe_block": True, "num_experts": E, "top_k_experts": TOP, "moe_intermediate_size": F},
        **{"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8},
        **{"hidden_size_per_layer_input": 0, "hidden_activation": "silu", **IDS},
    ),
    "jamba": lambda: t.JambaConfig(
        **NARROW,
        **{"num_experts": E, "num_experts_per_tok": TOP, "attn_layer_period": 3, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 0, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    ),
    "nemotron_h": lambda: t.NemotronHConfig(  # without a gate, and on latents of all experts together
        **{key: value for key, value in GQA.items() if key != "num_hidden_layers"},
        **{"n_routed_experts": E, "num_experts_per_tok": TOP, "moe_intermediate_size": F, "moe_latent_size": 16},
        **{"moe_shared_expert_intermediate_size": 40, "head_dim": 8},
        layers_block_type=["moe", "full_attention", "moe"],
    ),
}
ATTENTION_STAYS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "gemma4_text", "llama4_text"}
OF_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1", "exaone_moe")
SHARED = {
    **dict.fromkeys(("qwen2_moe", "qwen3_next"), "mlp.shared_expert"),
    **dict.fromkeys((*OF_DEEPSEEK, "ernie4_5_moe"), "mlp.shared_experts"),
    "granitemoehybrid": "shared_mlp",
    "nemotron_h": "mixer.shared_experts",
    "gemma4_text": "mlp",
    "llama4_text": "feed_forward.shared_expert",
}
PLAIN = {
    ("qwen2_moe", 1),
    ("qwen3_next", 1),
    ("lfm2_moe", 0),
    ("jamba", 1),
    ("nemotron_h", 1),
    ("ernie4_5_moe", 0),
    ("llama4_text", 1),
    *((family, 0) for family in OF_DEEPSEEK),
}  # blocks without experts


def _qwen() -> dict:
    return {**GQA, "num_experts": E, "num_experts_per_tok": TOP, "moe_intermediate_size": F}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[family]())
    for name, parameter in model.named_parameters():
        if name.endswith("correction_bias"):  # of ERNIE's router; a larger one sends all tokens to the same experts
            nn.init.normal_(parameter, std=0.01)
        elif parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1 if name.endswith("bias") else 0.25)
        elif name.endswith("per_expert_scale"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def opened(model: nn.Module):
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    return source


def text(rows: int = 32) -> CalibrationData:
    return CalibrationData(some_ids(rows, 32, seed=1), "random", "random", 0, held_out=some_ids(4, 32, seed=2))


@torch.no_grad()
def logits(model) -> Tensor:
    return model(some_ids()).logits


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Every tensor to the bit; products depend on where in memory a tensor begins."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    torch.testing.assert_close(logits(one), logits(other))


def experts_of(model: nn.Module, index: int) -> nn.Module | None:
    block = model.model.layers[index]
    names = ("block_sparse_moe", "feed_forward", "mlp", "mixer")
    owners = (getattr(block, name, None) for name in names)
    return getattr(block, "experts", None) or getattr(next(filter(None, owners)), "experts", None)


# ---------------------------------------------------------------------------------------------------------------------
# A reading of our own


class Routed(NamedTuple):
    """What one forward sends to the experts of one block."""

    tokens: Tensor  # (n, D)
    chosen: Tensor  # (n, k)
    weights: Tensor  # (n, k)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Its tokens ``(m, D)`` and their weights ``(m, 1)``."""
        rows, place = (self.chosen == expert).nonzero(as_tuple=True)
        return self.tokens[rows].double(), self.weights[rows, place, None].double()


class One(NamedTuple):
    """One expert, fp64."""

    gate: Tensor  # (F, D); up again where there is none
    up: Tensor
    down: Tensor  # (D, F)
    gate_bias: Tensor | float
    up_bias: Tensor | float
    down_bias: Tensor | None

    def hidden(self, x: Tensor) -> Tensor:
        """``(m, F)``"""
        if self.gate is self.up:  # Nemotron-H
            return (x @ self.up.T).relu().square()
        gate, up = x @ self.gate.T + self.gate_bias, x @ self.up.T + self.up_bias
        if self.down_bias is None:
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)  # GPT-OSS
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def rising_of(module: nn.Module) -> str:
    return "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ in ("GptOssExperts", "Llama4TextExperts")


def one(module: nn.Module, expert: int) -> One:
    names = (rising_of(module), "down_proj")
    rising, down = (getattr(module, name).detach()[expert].double() for name in names)
    if names[0] == "up_proj":
        return One(rising, rising, down, 0.0, 0.0, None)
    if is_transposed(module):
        rising, down = rising.T, down.T
    if not hasattr(module, "down_proj_bias"):
        return One(*rising.chunk(2), down, 0.0, 0.0, None)
    rising_bias, down_bias = (getattr(module, f"{n}_proj_bias").detach()[expert].double() for n in ("gate_up", "down"))
    return One(rising[::2], rising[1::2], down, rising_bias[::2], rising_bias[1::2], down_bias)


@torch.no_grad()
def look(model: nn.Module, ids: Tensor, index: int) -> Routed:
    seen = []
    hook = experts_of(model, index).register_forward_pre_hook(lambda _, args: seen.append(args))
    model(ids, use_cache=False)
    hook.remove()
    return Routed(*seen[0]) if len(seen[0]) == 3 else multiplied(seen[0][0])


def multiplied(tokens: Tensor) -> Routed:
    """Of Llama 4's experts: each has a row of every token, of zeros where it is not sent there."""
    rows = (tokens != 0).any(1)
    chosen = torch.arange(E).repeat_interleave(len(tokens) // E)[rows, None]
    assert len(chosen) == len(tokens) // E * TOP
    return Routed(tokens[rows], chosen, torch.ones(chosen.shape))


def filled(routed: Routed, expert: int) -> tuple[Tensor, Tensor]:
    """As :meth:`Routed.of`, with others where there are fewer than four a unit."""
    tokens, weights = routed.of(expert)
    lacking = min(4 * F - len(tokens), len(routed.tokens))
    if lacking <= 0:
        return tokens, weights
    places = [round(i * (len(routed.tokens) - 1) / max(1, lacking - 1)) for i in range(lacking)]
    usual = weights.square().mean().sqrt() if len(weights) else torch.ones(()).double()
    others = routed.tokens[places].double()
    return torch.cat([tokens, others]), torch.cat([weights, usual.expand(lacking, 1)])


def kept(dense: One, small: One) -> Tensor:
    """``(R,)`` which units of the dense expert are left."""
    rows = torch.cdist(small.up, dense.up).argmin(1)
    torch.testing.assert_close(small.up, dense.up[rows])
    torch.testing.assert_close(small.gate, dense.gate[rows])
    if dense.down_bias is not None:
        torch.testing.assert_close(small.gate_bias, dense.gate_bias[rows])
        torch.testing.assert_close(small.up_bias, dense.up_bias[rows])
    assert len(rows.unique()) == len(rows) < F
    return rows


def ridge_fit(dense: One, keep: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Best down projection on ``keep``, and its bias, by weighted least squares."""
    h = dense.hidden(tokens)
    mean = (weights.square() * h).sum(0) / weights.square().sum() if dense.down_bias is not None else h.new_zeros(F)
    rows, total = (h - mean) * weights, weights.square().sum()
    gone = torch.ones(F, dtype=torch.bool).index_fill(0, keep, False)
    damping = (RIDGE * total * (rows.square().sum(0) / total).mean()).sqrt() * torch.eye(len(keep)).double()
    A, B = torch.cat([rows[:, keep], damping]), torch.cat([rows[:, gone], damping.new_zeros(len(keep), F - len(keep))])
    W = dense.down[:, keep] + dense.down[:, gone] @ torch.linalg.lstsq(A, B).solution.T
    bias = None if dense.down_bias is None else dense.down_bias + dense.down @ mean - W @ mean[keep]
    return W, bias


# ---------------------------------------------------------------------------------------------------------------------
# What is installed


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def run(request, tmp_path_factory):
    """Family, dense model, compressed one read back from its folder, its record, and the calibration windows."""
    return compressed(request.param, text(), tmp_path_factory.mktemp("experts") / "small")


def compressed(family: str, tokens: CalibrationData, folder):
    method = MoDeGPT(modules={"experts": 0.5}, ridge=RIDGE)
    source = opened(model_of(family))
    rankfold.compress(source, method=method, calibration=tokens, output=folder, mode="one-pass")
    record = json.loads((folder / "rankfold.json").read_text())
    return family, model_of(family), rankfold.load(folder, device="cpu"), record, tokens


def blocks_with_experts(model: nn.Module) -> list[int]:
    return [index for index in range(3) if experts_of(model, index) is not None]


def check_installed(run) -> None:
    """Every expert's weights, biases, and error, against least squares on its tokens."""
    _family, dense, small, record, tokens = run
    for index in blocks_with_experts(dense):
        report = record["blocks"][str(index)]["experts"]
        routed = look(dense, tokens.ids, index)
        errors = torch.zeros(2, dtype=torch.float64)
        for expert in range(E):
            theirs, ours = (one(experts_of(model, index), expert) for model in (dense, small))
            keep, (x, w) = kept(theirs, ours), filled(routed, expert)
            own = routed.of(expert)
            assert report["tokens"][expert] == len(own[0]) and report["filled"][expert] == len(x) - len(own[0])
            W, bias = ridge_fit(theirs, keep, x, w)
            torch.testing.assert_close(ours.down, W, rtol=CLOSE, atol=CLOSE * W.abs().max().item())
            if bias is not None:
                torch.testing.assert_close(ours.down_bias, bias, rtol=CLOSE, atol=CLOSE * bias.abs().max().item())
            found = squares(theirs, ours, keep, x, w)
            assert report["relative_errors"][expert] == pytest.approx((found[0] / found[1]).sqrt().item(), rel=CLOSE)
            errors += found * own[1].square().sum() / w.square().sum()
        assert report["relative_error"] == pytest.approx((errors[0] / errors[1]).sqrt().item(), rel=CLOSE)
        assert report["rank"] == experts_width(small, index) < F


def experts_width(model: nn.Module, index: int) -> int:
    return one(experts_of(model, index), 0).up.shape[0]


def squares(dense: One, small: One, keep: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Squared error of an expert in the output of its block, and its squared output; about means in a bias."""
    h = dense.hidden(x)
    if dense.down_bias is not None:
        h = h - (w.square() * h).sum(0) / w.square().sum()
    error, total = h @ dense.down.T - h[:, keep] @ small.down.T, h @ dense.down.T
    return torch.stack([(w * part).square().sum() for part in (error, total)])


def test_every_expert_is_the_weighted_ridge_fit_on_its_tokens(run):
    check_installed(run)
    assert not any(map(sum, (b["experts"]["filled"] for b in run[3]["blocks"].values() if "experts" in b)))


def test_held_out_errors_are_those_of_the_tokens_held_out(run):
    _family, dense, small, record, tokens = run
    for index in blocks_with_experts(dense):
        routed, fitted = (look(dense, ids, index) for ids in (tokens.held_out, tokens.ids))
        errors = torch.zeros(2, dtype=torch.float64)
        for expert in range(E):
            theirs, ours = (one(experts_of(model, index), expert) for model in (dense, small))
            (x, w), (seen, weights), keep = routed.of(expert), fitted.of(expert), kept(theirs, ours)
            mean = (weights.square() * theirs.hidden(seen)).sum(0) / weights.square().sum()
            h = theirs.hidden(x) - (mean if theirs.down_bias is not None else 0)
            error = h @ theirs.down.T - h[:, keep] @ ours.down.T
            errors += torch.stack([(w * part).square().sum() for part in (error, h @ theirs.down.T)])
        said = record["blocks"][str(index)]["experts"]["held_out_error"]
        assert said == pytest.approx((errors[0] / errors[1]).sqrt().item(), rel=CLOSE)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_an_expert_that_saw_few_tokens_is_given_others(family, tmp_path):
    """Four windows of ten tokens: 80 places for 6 experts, which want 96 tokens each."""
    run = compressed(family, CalibrationData(some_ids(4, 10, seed=1), "random", "random", 0), tmp_path / "small")
    check_installed(run)
    reports = [block["experts"] for block in run[3]["blocks"].values() if "experts" in block]
    assert all(max(report["filled"]) > 0 for report in reports)


@pytest.mark.parametrize("family, bias", [("gpt_oss", "router.bias"), ("deepseek_v3", "gate.e_score_correction_bias")])
def test_an_expert_that_saw_no_token_is_fitted_to_those_of_all(family, bias, tmp_path, monkeypatch):
    plain = model_of

    def dead(family):
        model = plain(family)
        for index in blocks_with_experts(model):
            owner, name = bias.split(".")
            with torch.no_grad():
                getattr(getattr(model.model.layers[index].mlp, owner), name)[2] = -1e4
        return model

    monkeypatch.setitem(globals(), "model_of", dead)
    run = compressed(family, text(), tmp_path / "small")
    check_installed(run)
    reports = [block["experts"] for block in run[3]["blocks"].values() if "experts" in block]
    assert all(report["tokens"][2] == 0 and report["filled"][2] == 4 * F for report in reports)


def test_what_is_kept_of_a_block_are_its_tokens_and_their_routing():
    source = opened(model_of("mixtral"))
    view = source.block(0)
    moments = rankfold.calibrate(source, text())[0]
    routed = moments["experts_routing"].rows
    assert torch.equal((routed > 0).sum(1), torch.full((len(routed),), TOP))
    torch.testing.assert_close(routed.sum(1), torch.ones(len(routed)))
    assert moments["experts_input"].rows.shape == (len(routed), view.attention.output.weight.shape[0])


# ---------------------------------------------------------------------------------------------------------------------
# Contracts of the whole model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def default(request):
    """Family, source, and the model by the default method."""
    source = opened(model_of(request.param))
    return (
        request.param,
        source,
        rankfold.compress(source, method=Rankfold(sparsity=0.3, rank_multiple=2), calibration=text()).model,
    )


def test_sparsity_zero_leaves_the_logits_unchanged(default):
    _family, source, _ = default
    torch.testing.assert_close(
        logits(rankfold.compress(source, method=MoDeGPT(sparsity=0.0), calibration=text()).model), logits(source.model)
    )


def test_narrower_experts_compute_what_experts_with_silent_units_compute(run):
    """The family's own module over narrower tensors, and the stock one in which the other units send nothing."""
    family, _dense, small, *_ = run
    stock = model_of(family)
    for index in blocks_with_experts(stock):
        module, ours = experts_of(stock, index), experts_of(small, index)
        assert type(module) is type(ours) and getattr(ours, "config", small.config) is small.config
        for expert in range(E):
            keep = kept(one(module, expert), one(ours, expert))
            full = torch.zeros_like(one(module, expert).down)
            full[:, keep] = one(ours, expert).down
            module.down_proj.data[expert] = full.T if is_transposed(module) else full
            if family == "gpt_oss":
                module.down_proj_bias.data[expert] = ours.down_proj_bias[expert]
    torch.testing.assert_close(logits(small), logits(stock), rtol=1e-4, atol=1e-5)


def test_the_stock_class_computes_the_same_with_all_experts_as_wide_as_the_widest(run, tmp_path):
    family, _, small, *_ = run
    rankfold.save(small, tmp_path / "small")
    if family in (
        *OF_DEEPSEEK,
        "ernie4_5_moe",
        "jamba",
        "llama4_text",
    ):  # one number of the config is the width of something else, too
        with pytest.raises(UnsupportedModelError, match="as large as the dense model"):
            rankfold.export(tmp_path / "small", tmp_path / "stock")
        return
    rankfold.export(tmp_path / "small", tmp_path / "stock")
    stock = t.AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert not any(type(module).__module__.startswith("rankfold") for module in stock.modules())
    widest = max(experts_width(small, index) for index in blocks_with_experts(small))
    assert all(experts_width(stock, index) == widest < F for index in blocks_with_experts(stock))
    torch.testing.assert_close(logits(stock), logits(small), rtol=1e-4, atol=1e-5)


def test_planned_equals_actual_and_so_do_active_parameters(default):
    _family, source, model = default
    method = Rankfold(sparsity=0.3, rank_multiple=2)
    plan = rankfold.plan(source, method=method, calibration=text())
    assert plan.sparsity >= 0.3
    for net, total, active in (
        (source.model, plan.parameters, plan.active_parameters),
        (model, plan.parameters_after, plan.active_parameters_after),
    ):
        idle = sum(p[TOP:].numel() for i in blocks_with_experts(net) for p in experts_of(net, i).parameters())
        assert sum(p.numel() for p in net.parameters()) == total and total - idle == active
    assert plan.experts["of_a_block"] == E and plan.experts["of_a_token"] == TOP
    widths = {(m.block, m.module): m.rank for m in plan.modules}
    for index in blocks_with_experts(model):
        assert experts_width(model, index) == widths[index, "experts"]


def test_the_cache_is_what_the_plan_says(default):
    _, source, model = default
    plan = rankfold.plan(source, method=Rankfold(sparsity=0.3, rank_multiple=2), calibration=text())
    with torch.no_grad():
        for net, planned in ((source.model, plan.kv_bytes_per_token), (model, plan.kv_bytes_per_token_after)):
            assert 4 * cached_numbers(net) == planned


def test_saved_and_loaded_logits_are_identical(default, tmp_path):
    _, _, model = default
    rankfold.save(model, tmp_path / "small")
    again = rankfold.load(tmp_path / "small", device="cpu")
    assert_same(again, model)
    again.save_pretrained(tmp_path / "twice")  # under the names of the hub: one tensor for each expert
    assert_same(rankfold.load(tmp_path / "twice", device="cpu"), model)


def test_folder_and_memory_give_the_same_model(default, tmp_path):
    _, source, model = default
    folder = rankfold.compress(
        source, method=Rankfold(sparsity=0.3, rank_multiple=2), calibration=text(), output=tmp_path / "out"
    ).output
    assert_same(rankfold.load(folder, device="cpu"), model)


def test_generation_with_cache_equals_without(default):
    _, _, model = default
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = some_ids()
    cached, plain = (
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(cached, plain)


def test_moments_from_a_folder_are_those_in_memory(default, tmp_path):
    _, source, _ = default
    method = MoDeGPT(sparsity=0.3)
    rankfold.calibrate(source, text(), tmp_path / "moments")
    from_folder = rankfold.compress(
        source, method=method, moments=rankfold.MomentStore.open(tmp_path / "moments")
    ).model
    assert_same(from_folder, rankfold.compress(source, method=method, calibration=text(), mode="one-pass").model)


def test_a_plan_with_moments_says_how_many_tokens_each_expert_saw(default):
    _family, source, _ = default
    plan = rankfold.plan(source, method=MoDeGPT(sparsity=0.3), moments=rankfold.calibrate(source, text()))
    for index in blocks_with_experts(source.model):
        routed = look(source.model, text().ids, index)
        assert plan.experts["tokens"][str(index)] == [len(routed.of(expert)[0]) for expert in range(E)]
    assert plan.to_dict()["experts"]["filled"].keys() == plan.experts["tokens"].keys()


@pytest.mark.parametrize("family", sorted(SHARED))
def test_shared_experts_and_plain_blocks_are_reduced_as_mlps(family):
    model = rankfold.compress(opened(model_of(family)), method=MoDeGPT(modules={"mlp": 0.5}), calibration=text()).model
    dense = model_of(family)
    for index in blocks_with_experts(dense) if family == "nemotron_h" else range(3):
        path = SHARED[family]
        if (family, index) in PLAIN:
            path = "feed_forward" if family == "llama4_text" else "mlp"
        down = f"{path}.{'output_linear' if path == 'shared_mlp' else 'down_proj'}"
        ours, theirs = (net.model.layers[index].get_submodule(down).weight for net in (model, dense))
        assert 0 < ours.shape[1] < theirs.shape[1]
        if (family, index) not in PLAIN:
            assert experts_width(model, index) == F


def test_bytes_can_be_the_budget():
    method = MoDeGPT(sparsity=0.3, budget="bytes", modules=("experts",))
    model = rankfold.compress(opened(model_of("gpt_oss")), method=method, calibration=text(8)).model
    bytes_of = [4 * sum(p.numel() for p in m.model.layers.parameters()) for m in (model, model_of("gpt_oss"))]
    assert bytes_of[0] <= 0.7 * bytes_of[1]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_is_timed_has_the_shapes_of_what_is_planned(family):
    source = opened(model_of(family))
    view = source.block(0)
    small = replace(view, MoDeGPT().truncated(view, {"experts": 8}), source)
    assert small.experts.hidden == 8 and small.experts.count == E
    dense, cut = one(experts_of(source.model, 0), 3), one(small.experts.module, 3)
    assert torch.equal(cut.up, dense.up[:8]) and torch.equal(cut.down, dense.down[:, :8])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    "family, modules, message",
    [
        (
            "deepseek_v3",
            ("vo",),
            "cannot take module 'vo': its keys and values are latents already.*use modules=.'mlp', 'experts'",
        ),
        ("mixtral", ("mlp",), "cannot take module 'mlp': it does not have an MLP that all tokens go through"),
    ],
)
def test_modules_that_are_not_there_are_refused(family, modules, message):
    with pytest.raises(UnsupportedModelError, match=message):
        rankfold.compress(opened(model_of(family)), method=MoDeGPT(modules=modules), calibration=text(4))


@pytest.mark.parametrize("method", ["slicegpt"])
@pytest.mark.parametrize("family", sorted(ATTENTION_STAYS))
def test_other_methods_refuse_such_attention_in_one_line(family, method):
    with pytest.raises(UnsupportedModelError, match=f"{method} cannot take this {family}.*method='rankfold'") as error:
        rankfold.compress(
            opened(model_of(family)), method=rankfold.make_method(method, sparsity=0.1), calibration=text(4)
        )
    assert "\n" not in str(error.value)


def test_a_latent_method_has_no_module_of_that_name():
    with pytest.raises(OptionError, match="unknown module 'experts'"):
        rankfold.make_method("latentllm", modules=("experts",))


def test_a_model_without_experts_says_so():
    source = opened(t.LlamaForCausalLM(t.LlamaConfig(**GQA)))
    with pytest.raises(
        UnsupportedModelError, match="cannot take module 'experts': it has none; use modules=.'mlp', 'qk', 'vo'."
    ):
        rankfold.compress(source, method=MoDeGPT(modules=("experts",)), calibration=text(4))


def choosing(tensors) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name.endswith(("correction_bias", "expert_bias"))}


def with_biases(family: str, folder):
    """A model in bf16, and the fp32 biases by which it chooses experts: near each other, as those of trained models."""
    model = model_of(family).to(torch.bfloat16)
    biases = {name: 7 + 0.01 * torch.randn(len(bias)) for name, bias in choosing(dict(model.named_buffers())).items()}
    for name, bias in biases.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, bias)
    model.save_pretrained(folder)
    return biases


def biases_in(folder) -> dict:
    return choosing({name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()})


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["glm4_moe", "lfm2_moe", "nemotron_h"])
def test_what_experts_are_chosen_by_is_not_rounded(family, tmp_path):
    biases = with_biases(family, tmp_path / "dense")
    method = rankfold.make_method("modegpt", sparsity=0.08, rank_multiple=2, allocation="uniform", target="stock")
    auto, options = t.AutoModelForCausalLM, {"method": method, "calibration": text()}
    small = rankfold.compress(tmp_path / "dense", output=tmp_path / "small", device="cpu", **options).output
    rankfold.export(small, tmp_path / "stock")
    assert_equal(biases_in(small), biases)
    assert_equal(biases_in(tmp_path / "stock"), biases)
    for held, dtype in ((torch.float32, "bfloat16"), (torch.bfloat16, "auto")):
        source = rankfold.open_model(auto.from_pretrained(tmp_path / "dense", dtype=held), device="cpu", dtype=dtype)
        assert_equal(choosing(rankfold.compress(source, **options).model.state_dict()), biases)


@pytest.mark.parametrize(
    "family, method",
    [
        ("glm4_moe", "modegpt"),
        ("lfm2_moe", "reap"),
        ("dots1", "shortgpt"),
        ("apertus", "shortgpt"),
        ("nemotron_h", "reap"),
    ],
)
def test_buffers_are_among_the_bytes_of_the_plan(family, method, tmp_path):
    model = tiny_model(family) if family == "apertus" else model_of(family)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    source = rankfold.open_model(tmp_path / "dense", device="cpu")
    most = int(1.5 * sum(p.numel() for p in model.parameters()))
    found = rankfold.compress(source, 0.15, method=method, calibration=text(8), output=tmp_path / "small")
    dense, small = (
        sum(x.nbytes for file in place.glob("*.safetensors") for x in load_file(file).values())
        for place in (tmp_path / "dense", found.output)
    )
    chosen_by = sum(x.nbytes for x in choosing(model.state_dict()).values())  # of two bytes here, written in four
    assert (found.plan.bytes, found.plan.bytes_after) == (dense + chosen_by, small)
    if method == "reap":
        assert rankfold.plan(source, method="modegpt", target_size=most).bytes_after <= most
