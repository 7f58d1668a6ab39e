"""Errors weighed by the gradient of the loss, against raw activations, autograd in the stock model, and weights.

Shape legend: D model width, H query heads, K key heads, N head dimension.
"""

import json

import pytest
import torch
from torch import Tensor

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, look, member, weight_of
from families import KINDS, opened, some_ids, tiny_model, tokens
from gradients import stock_gradients
from rankfold import MoDeGPT, Rankfold
from rankfold.calibration import backward
from rankfold.compression import importance as scores
from rankfold.compression.budget import rank_options
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.compression.plan import shares
from rankfold.errors import OptionError
from rankfold.methods.modegpt import output_weighting

GRADIENT = {"output_weighting": "fisher", "rank_multiple": 2, "allocation": "uniform"}


def gradients_of(family: str, index: int) -> dict[str, Tensor]:
    """``(n, D)`` the stock model's gradients after the MLP and the attention of a block."""
    model = tiny_model(family)
    block = blocks_of(model)[index]
    paths = {module: name for name, module in block.named_modules()}
    layers = {"vo": paths[member(member(block, ATTENTION), OUTPUT)], "mlp": paths[member(block, DOWN)]}
    found = stock_gradients(model, tokens(32).ids, {index: layers})
    return {name: g for (_, name), g in found.items()}


def metrics(family: str, index: int) -> dict[str, Tensor]:
    """``(D, D)`` second moments of these."""
    return {name: g.T @ g / len(g) for name, g in gradients_of(family, index).items()}


def compressed(folder, family: str, cls=MoDeGPT, **options):
    """The model, its record, and the dense one."""
    method = cls(**GRADIENT | options)
    how = {"mode": "one-pass"} if cls is MoDeGPT else {}
    path = rankfold.compress(opened(family), method=method, calibration=tokens(32), output=folder, **how).output
    return rankfold.load(path, device="cpu"), json.loads((path / "rankfold.json").read_text()), tiny_model(family)


def damped(G: Tensor) -> Tensor:
    return G + output_weighting.RIDGE * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype)


def dropped_cost(W: Tensor, C: Tensor, G: Tensor, keep: list[int]) -> float:
    """``tr(G dW C dW^T)`` after the best refit."""
    drop = [i for i in range(len(C)) if i not in keep]
    schur = C[drop][:, drop] - C[drop][:, keep] @ torch.linalg.solve(C[keep][:, keep], C[keep][:, drop])
    return (G @ W[:, drop] @ schur @ W[:, drop].T).trace().item()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_units_leave_in_the_order_of_naive_greedy_search_in_the_metric_of_the_loss(family, tmp_path):
    small, _, dense = compressed(tmp_path / "small", family, modules={"mlp": 0.2}, bias_refit=False)
    for index in (0, 2):
        a, down = look(dense, tokens(32).ids, index).hidden.double(), member(blocks_of(dense)[index], DOWN)
        C, W, G = a.T @ a / len(a), weight_of(down).double(), damped(metrics(family, index)["mlp"])
        C = C + 1e-4 * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)
        rank, keep = weight_of(member(blocks_of(small)[index], DOWN)).shape[1], list(range(len(C)))
        while len(keep) > rank:
            keep = min(([i for i in keep if i != j] for j in keep), key=lambda rest: dropped_cost(W, C, G, rest))
        rising = "mlp.up_proj" if family == "llama" else "mlp.c_fc"
        rows = [weight_of(blocks_of(m)[index].get_submodule(rising)) for m in (dense, small)]
        found = [next(i for i, row in enumerate(rows[0]) if torch.equal(row, kept)) for kept in rows[1]]
        assert dropped_cost(W, C, G, found) == pytest.approx(dropped_cost(W, C, G, keep), rel=1e-4)
        assert dropped_cost(W, C, G, found) < 0.999 * dropped_cost(W, C, G, list(range(rank)))


def test_values_are_the_best_in_the_metric_of_the_loss(tmp_path):
    """Eigenvalues of ``B A`` are what each direction of a value head is worth; those that went are the least ones."""
    small, record, dense = compressed(tmp_path / "small", "llama", modules={"vo": 0.5})
    for index in range(3):
        seen, G = look(dense, tokens(32).ids, index).heads, damped(metrics("llama", index)["vo"])
        attention, reduced = (member(blocks_of(m)[index], ATTENTION) for m in (dense, small))
        H, K, N = seen.query.shape[1], seen.value.shape[1], seen.value.shape[-1]
        W_o = weight_of(attention.o_proj).double().unflatten(1, (K, H // K, N))  # (D, K, G, N)
        new_o = weight_of(reduced.o_proj).double().unflatten(1, (K, H // K, -1))
        W_v, new_v = (weight_of(m.v_proj).double().unflatten(0, (K, -1)) for m in (attention, reduced))
        least = lost = total = 0.0
        for k in range(K):
            v = seen.value[:, k].flatten(0, 1).double()
            A = v.T @ v / len(v)
            B = sum(W_o[:, k, j].T @ G @ W_o[:, k, j] for j in range(H // K))
            worth = torch.linalg.eigvals(B @ A).real.sort().values
            least, total = least + worth[: N - new_v.shape[1]].sum().item(), total + worth.sum().item()
            through = torch.linalg.lstsq(W_v[k].T, new_v[k].T).solution.T  # W_v' = E W_v
            for j in range(H // K):
                gap = W_o[:, k, j] - new_o[:, k, j] @ through
                lost += (G @ gap @ A @ gap.T).trace().item()
        assert lost == pytest.approx(least, rel=1e-3)
        assert record["blocks"][str(index)]["vo"]["weighted_error"] ** 2 == pytest.approx(least / total, rel=1e-3)


def test_values_fitted_to_what_attention_sends_are_the_best_in_the_metric_of_the_loss(tmp_path):
    """In the first block: what is kept of a value head are eigenvectors of ``B A``, the ones worth most."""
    shape = {"modules": {"vo": 0.5}, "residual_correction": False}
    small, record, dense = compressed(tmp_path / "small", "llama", Rankfold, **shape)
    attention, reduced = (member(blocks_of(m)[0], ATTENTION) for m in (dense, small))
    sent = []
    attention.o_proj.register_forward_pre_hook(lambda _, args: sent.append(args[0].detach().flatten(0, -2).double()))
    with torch.no_grad():
        dense(tokens(32).ids)
    z, G = sent[0].unflatten(1, (2, 2, 8)), metrics("llama", 0)["vo"]  # (n, K, G, N)
    W_o = weight_of(attention.o_proj).double().unflatten(1, (2, 2, 8))
    W_v, new_v = (weight_of(m.v_proj).double().unflatten(0, (2, -1)) for m in (attention, reduced))
    for k in range(2):
        A = sum(z[:, k, j].T @ z[:, k, j] / len(z) for j in range(2))
        B = sum(W_o[:, k, j].T @ damped(G) @ W_o[:, k, j] for j in range(2))
        kept = torch.linalg.lstsq(W_v[k].T, new_v[k].T).solution  # (N, R)
        worth = ((B @ A @ kept) * kept).sum(0) / kept.square().sum(0)
        assert (B @ A @ kept - worth * kept).norm() < 1e-3 * (worth * kept).norm()
        best = torch.linalg.eigvals(B @ A).real.sort(descending=True).values[: len(worth)]
        torch.testing.assert_close(worth.sort(descending=True).values, best, rtol=1e-3, atol=0)
    sent = sent[0]
    received = torch.block_diag(
        *(torch.linalg.lstsq(W_v[k].T, new_v[k].T).solution.T for k in range(2) for _ in range(2))
    )  # (H R, H N)
    gap = weight_of(attention.o_proj).double() - weight_of(reduced.o_proj).double() @ received
    lost = (G @ gap @ (sent.T @ sent / len(sent)) @ gap.T).trace().item() / 2
    assert record["blocks"]["0"]["vo"]["predicted_loss"] == pytest.approx(lost, rel=1e-3)


@pytest.mark.parametrize(("family", "cls"), [("llama", MoDeGPT), ("gemma2", Rankfold), ("olmo2", Rankfold)])
def test_the_predicted_loss_is_that_of_the_installed_weights(family, cls, tmp_path):
    """Where a norm follows, errors are over the RMS of a token's output, and gradients are times that."""
    small, record, dense = compressed(tmp_path / "small", family, cls, modules={"mlp": 0.3})
    for index in range(3 if cls is MoDeGPT else 1):
        a, g = look(dense, tokens(32).ids, index).hidden.double(), gradients_of(family, index)["mlp"]
        W = weight_of(blocks_of(dense)[index].mlp.down_proj).double()
        if cls is Rankfold:
            rms = (a @ W.T).square().mean(1, keepdim=True).sqrt()
            a, g = a / rms, g * rms
        rows = [weight_of(blocks_of(m)[index].mlp.up_proj) for m in (dense, small)]
        keep = [next(i for i, row in enumerate(rows[0]) if torch.equal(row, kept)) for kept in rows[1]]
        gap = W.clone()
        gap[:, keep] -= weight_of(blocks_of(small)[index].mlp.down_proj).double()
        wanted = (g.T @ g / len(g) @ gap @ (a.T @ a / len(a)) @ gap.T).trace().item() / 2
        assert record["blocks"][str(index)]["mlp"]["predicted_loss"] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("family", KINDS)
def test_every_family_takes_it(family, tmp_path):
    small, record, _ = compressed(tmp_path / "small", family, Rankfold, sparsity=0.3, allocation="uniform")
    with torch.no_grad():
        assert small(some_ids()).logits.isfinite().all()
    assert record["options"]["output_weighting"] == "fisher"
    # Of an attention only where nothing is fitted after its values: feedback changes what they are worth.
    without = {"qk", "experts"} | ({"vo"} if opened(family).block(0).is_plain_residual else set())
    for reports in record["blocks"].values():
        assert {m for m, report in reports.items() if "predicted_loss" in report} == reports.keys() - without


def test_curves_and_effects_are_in_the_metric_too():
    """At the rank that was tried a module's cost is its effect; between ranks it follows the weighted errors."""
    source, method = opened("llama"), Rankfold(sparsity=0.3, rank_multiple=2, output_weighting="fisher")
    gradients = scores.gradients_of(source, method, tokens())
    costs = measure_kl_sensitivity(source, method, tokens(), *shares(rank_options(source, method), method), gradients)
    plain = Rankfold(sparsity=0.3, rank_multiple=2)
    others = measure_kl_sensitivity(source, plain, tokens(), *shares(rank_options(source, plain), plain))
    for (block, module), cost in costs.items():
        same = cost == others[block, module]
        assert same == (module == "qk"), (block, module)
        falling = [cost[rank] for rank in sorted(cost) if rank]
        assert falling == sorted(falling, reverse=True) and falling[-1] == 0.0


@pytest.mark.parametrize("when", ["in the sweep", "after it"])
def test_resumed_runs_find_the_same_gradients(when, tmp_path, monkeypatch):
    """They are kept with an unfinished run, and read again; what is missing is measured, the rest is not."""
    from rankfold import pipeline

    source, method = opened("llama"), Rankfold(sparsity=0.3, rank_multiple=2, output_weighting="fisher")
    whole = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "whole").output
    run_stages, sweep, measured = pipeline.run_stages, backward.sweep, []

    def dies_in_the_sweep(*args):
        for index, moments in sweep(*args):
            if index == 1:
                raise KeyboardInterrupt
            yield index, moments

    def dies_after_it(work, view, *rest):
        raise KeyboardInterrupt

    def counted(source, ids, observers, first, shards):
        measured.append(first)
        return sweep(source, ids, observers, first, shards)

    name, dies = {
        "in the sweep": ((scores, "sweep"), dies_in_the_sweep),
        "after it": ((pipeline, "run_stages"), dies_after_it),
    }[when]
    monkeypatch.setattr(*name, dies)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed")
    monkeypatch.setattr(pipeline, "run_stages", run_stages)
    monkeypatch.setattr(scores, "sweep", counted)
    assert (tmp_path / "killed.partial" / "gradients").is_dir()
    resumed = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed").output
    assert measured == ([0] if when == "in the sweep" else [])
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (resumed / path.name).read_bytes()
    assert not (resumed / "gradients").exists()


def test_moments_hold_no_gradients_and_say_so(tmp_path):
    source = opened("llama")
    store = rankfold.calibrate(source, tokens())
    for act in (rankfold.compress, rankfold.plan):
        with pytest.raises(
            OptionError, match="gradients are measured on text, which moments do not hold; give calibration"
        ):
            act(source, method=MoDeGPT(**GRADIENT), moments=store)
    with pytest.raises(OptionError, match="gradients are measured on text"):
        rankfold.compress(source, method=MoDeGPT(**GRADIENT), moments=store, output=tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="unknown latentllm option 'output_weighting'"):
        rankfold.make_method("latentllm", output_weighting="fisher")


def test_a_plan_with_moments_and_text_is_what_compressing_reports(tmp_path):
    source, method = opened("llama"), MoDeGPT(**GRADIENT)
    plan = rankfold.plan(source, method=method, calibration=tokens(32), moments=rankfold.calibrate(source, tokens(32)))
    _, record, _ = compressed(tmp_path / "small", "llama")
    for module in plan.modules:
        assert record["blocks"][str(module.block)][module.module]["relative_error"] == pytest.approx(
            module.relative_error
        )
