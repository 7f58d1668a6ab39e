"""Experts through latents: what is installed, against singular values of what the family's own modules are called with.

Shape legend: E experts, n tokens, D model width, F hidden width of an expert, R rank.
"""

import copy
import json

import pytest
import torch
import transformers as t
from test_experts import (
    CONFIGS,
    TOP,
    E,
    F,
    assert_same,
    blocks_with_experts,
    experts_of,
    filled,
    is_transposed,
    logits,
    look,
    model_of,
    one,
    opened,
    rising_of,
    text,
)
from torch import Tensor, nn

import rankfold
from families import some_ids
from rankfold import LatentLLM
from rankfold.errors import UnsupportedModelError

SIDES = {"experts_up": "rising", "experts_down": "falling"}
CLOSE = 2e-3


def stored(module: nn.Module, side: str, expert: int) -> Tensor:
    """``(2 F, D)`` or ``(D, F)`` a dense weight, rows as the family has them."""
    weight = getattr(module, rising_of(module) if side == "experts_up" else "down_proj").detach()[expert].double()
    return weight.T if is_transposed(module) else weight


@torch.no_grad()
def amounts_to(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """``(O, N)`` matrix and ``(O,)`` bias of a layer."""
    bias = layer(torch.zeros(1, layer.in_features))
    return (layer(torch.eye(layer.in_features)) - bias).T.double(), bias[0].double()


def rows_of(dense: nn.Module, side: str, expert: int, x: Tensor) -> Tensor:
    return x if side == "experts_up" else one(dense, expert).hidden(x)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def run(request, tmp_path_factory):
    method = LatentLLM(modules={"experts_up": 0.4, "experts_down": 0.4}, ridge=1e-9, rank_multiple=1)
    folder = tmp_path_factory.mktemp("latent") / "small"
    rankfold.compress(
        opened(model_of(request.param)), method=method, calibration=text(), output=folder, mode="one-pass"
    )
    return (
        model_of(request.param),
        rankfold.load(folder, device="cpu"),
        json.loads((folder / "rankfold.json").read_text()),
    )


@pytest.mark.parametrize("side", SIDES)
def test_every_expert_has_the_best_matrix_of_its_rank_on_its_tokens(run, side):
    dense, small, record = run
    for index in blocks_with_experts(dense):
        theirs, report = experts_of(dense, index), record["blocks"][str(index)][side]
        routed, apart = look(dense, text().ids, index), look(dense, text().held_out, index)
        errors, there = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for expert in range(E):
            W, (new, bias) = (
                stored(theirs, side, expert),
                amounts_to(getattr(experts_of(small, index), SIDES[side])[expert]),
            )
            (x, w), own, others = filled(routed, expert), routed.of(expert), apart.of(expert)
            h = rows_of(theirs, side, expert, x)
            centred = hasattr(theirs, "down_proj_bias")
            mean = (w.square() * h).sum(0) / w.square().sum() if centred else torch.zeros(h.shape[1]).double()
            spectrum = torch.linalg.svdvals(((h - mean) * w) @ W.T).square()
            lost = ((h - mean) * w @ (W - new).T).square().sum()
            assert lost == pytest.approx(spectrum[report["rank"] :].sum().item(), rel=CLOSE)
            assert report["relative_errors"][expert] == pytest.approx((lost / spectrum.sum()).sqrt().item(), rel=CLOSE)
            if centred:
                name = "gate_up_proj_bias" if side == "experts_up" else "down_proj_bias"
                expected = getattr(theirs, name).detach()[expert].double() + (W - new) @ mean
                torch.testing.assert_close(bias, expected, rtol=CLOSE, atol=CLOSE)
            errors += torch.stack([lost, spectrum.sum()]) * own[1].square().sum() / w.square().sum()
            rows = (rows_of(theirs, side, expert, others[0]) - mean) * others[1]
            there += torch.stack([(rows @ M.T).square().sum() for M in (W - new, W)])
            assert report["tokens"][expert] == len(own[0]) and report["filled"][expert] == len(x) - len(own[0])
        assert report["relative_error"] == pytest.approx((errors[0] / errors[1]).sqrt().item(), rel=CLOSE)
        assert report["held_out_error"] == pytest.approx((there[0] / there[1]).sqrt().item(), rel=CLOSE)


@torch.no_grad()
def test_the_familys_own_module_computes_the_same_with_what_the_factors_amount_to(run):
    dense, small, _ = run
    dense = copy.deepcopy(dense)
    for index in blocks_with_experts(dense):
        theirs, ours = experts_of(dense, index), experts_of(small, index)
        for (side, name), layer in zip(SIDES.items(), (rising_of(theirs), "down_proj"), strict=True):
            for expert in range(E):
                weight, bias = amounts_to(getattr(ours, name)[expert])
                biased = hasattr(theirs, "down_proj_bias")
                assert weight.shape == stored(theirs, side, expert).shape
                getattr(theirs, layer)[expert] = (weight.T if is_transposed(theirs) else weight).float()
                if biased:
                    getattr(theirs, f"{layer}_bias")[expert] = bias.float()
    torch.testing.assert_close(logits(small), logits(dense), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def default(request, tmp_path_factory):
    """DenseModel, folder, and the model, all that the method takes made smaller."""
    source, folder = opened(model_of(request.param)), tmp_path_factory.mktemp("latent") / "small"
    plans = []
    rankfold.compress(
        source,
        method=LatentLLM(sparsity=0.25, rank_multiple=1),
        calibration=text(),
        output=folder,
        on_plan=plans.append,
    )
    return source, folder, rankfold.load(folder, device="cpu"), plans[0]


def test_planned_equals_actual_and_so_do_active_parameters(default):
    source, _, model, plan = default
    assert plan.sparsity >= 0.25
    assert any("experts" in m.module and m.rank < m.of for m in plan.modules)
    of_experts = [sum(p.numel() for p in experts_of(model, i).parameters()) for i in blocks_with_experts(model)]
    idle = sum(count // E * (E - TOP) for count in of_experts)
    total = sum(p.numel() for p in model.parameters())
    assert (total, total - idle) == (plan.parameters_after, plan.active_parameters_after)
    assert sum(p.numel() for p in source.model.parameters()) == plan.parameters


def test_it_loads_again_under_any_name_and_without_rankfold(default, tmp_path):
    _, folder, model, _ = default
    model.save_pretrained(tmp_path / "twice")
    assert_same(rankfold.load(tmp_path / "twice", device="cpu"), model)
    remote = t.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    torch.testing.assert_close(logits(remote), logits(model))


def test_generation_with_cache_equals_without(default):
    *_, model, _ = default
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (model.generate(some_ids(), use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def test_gradients_reach_the_factors(default):
    *_, model, _ = default
    model.train()
    model(some_ids(), labels=some_ids()).loss.backward()
    for index in blocks_with_experts(model):
        module = experts_of(model, index)
        assert all(
            any(p.grad is not None and p.grad.any() for p in part.parameters())
            for part in (module.rising, module.falling)
        )
    model.eval().zero_grad()


def test_at_full_rank_nothing_changes_and_one_side_alone_leaves_the_other(default):
    source, *_ = default
    torch.testing.assert_close(
        logits(rankfold.compress(source, method=LatentLLM(sparsity=0.0), calibration=text()).model),
        logits(source.model),
    )
    small = rankfold.compress(
        source, method=LatentLLM(modules={"experts_down": 0.3}, rank_multiple=1), calibration=text()
    ).model
    index = blocks_with_experts(source.model)[0]
    ours, theirs = experts_of(small, index), experts_of(source.model, index)
    for expert in range(E):
        torch.testing.assert_close(
            amounts_to(ours.rising[expert])[0], stored(theirs, "experts_up", expert), rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(
            amounts_to(ours.falling[expert])[0], stored(theirs, "experts_down", expert), atol=1e-3
        )


@pytest.mark.parametrize("method, named", [("bolaco", True), ("fwsvd", True), ("bolaco", False)])
def test_forms_that_read_what_is_not_measured_of_experts_leave_them_dense(method, named):
    source = opened(model_of("mixtral"))
    if named:
        with pytest.raises(
            UnsupportedModelError, match=r"mixtral has no module 'experts_up' that can be compressed; it has:"
        ):
            rankfold.compress(
                source, method=rankfold.make_method(method, sparsity=0.1, modules=("experts_up",)), calibration=text(4)
            )
        return
    small = rankfold.compress(source, method=rankfold.make_method(method, sparsity=0.05), calibration=text(4)).model
    assert type(experts_of(small, 0)) is type(experts_of(source.model, 0))


def test_a_stock_class_cannot_have_them(tmp_path):
    method = LatentLLM(modules={"experts_up": 0.4}, rank_multiple=1)
    folder = rankfold.compress(
        opened(model_of("mixtral")), method=method, calibration=text(4), output=tmp_path / "small"
    ).output
    with pytest.raises(UnsupportedModelError, match=r"experts is a LatentExperts, which no stock model has[^\n]*$"):
        rankfold.export(folder, tmp_path / "stock")
    assert F == 24 and not (tmp_path / "stock").exists()
