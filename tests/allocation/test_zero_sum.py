"""ZS-SVD: first-order changes of the loss against autograd, the rule against one written out, whole runs."""

import pytest
import torch
from torch import nn

import rankfold
from families import opened, tiny_model, tokens
from rankfold.allocation import PrunableModule, Share, ZeroSum, from_text
from rankfold.allocation.base import Allocation
from rankfold.errors import OptionError
from rankfold.linalg.preconditioner import preconditioner
from rankfold.methods.baselines.zero_sum import ZSSVD, loss_changes


def test_a_singular_value_changes_the_loss_as_autograd_says():
    """Of a matrix in a loss that is no quadratic; tall and wide, with a moment far from the identity."""
    for out, wide in ((5, 7), (7, 5)):
        generator = torch.Generator().manual_seed(out)
        x = torch.randn(40, wide, generator=generator, dtype=torch.float64) * torch.arange(1, wide + 1)
        W = torch.randn(out, wide, generator=generator, dtype=torch.float64, requires_grad=True)

        def loss(weight, x=x):
            return (x @ weight.T).tanh().square().sum()

        (G,) = torch.autograd.grad(loss(W), W)
        precond = preconditioner(x.T @ x, "rootcov", ridge=1e-9)
        found = loss_changes(W.detach(), G, precond)
        U, S, Vh = torch.linalg.svd(precond.apply(W.detach()), full_matrices=False)
        for i, expected in enumerate(found):
            part = precond.undo(S[i] * U[:, i : i + 1] @ Vh[i : i + 1])
            t = torch.zeros((), dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(loss(W.detach() - t * part), t)
            assert expected.item() == pytest.approx(slope.item(), rel=1e-6)
        assert (found > 0).any() and (found < 0).any()


def test_a_bias_that_takes_the_mean_of_what_is_lost_counts(monkeypatch):
    """Against the slope of the loss of the whole stock model, its weight and bias moved as the method moves them."""
    found, effects = {}, ZSSVD.singular_value_effects

    def keep(self, view, moments):
        return found.setdefault(view.index, effects(self, view, moments))

    monkeypatch.setattr(ZSSVD, "singular_value_effects", keep)
    rankfold.compress(opened("opt"), 0.3, method="zs-svd", rank_multiple=1, calibration=tokens(), mode="one-pass")
    model, ids = tiny_model("opt").double(), tokens().ids
    for name, path in {"q": "self_attn.q_proj", "o": "self_attn.out_proj", "up": "fc1"}.items():
        path, inputs = f"model.decoder.layers.1.{path}", []
        layer = model.get_submodule(path)
        hook = layer.register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0].flatten(0, -2)))
        with torch.no_grad():
            model(ids)
        hook.remove()
        W, b, (x,) = layer.weight.detach(), layer.bias.detach(), inputs
        precond = preconditioner(x.T.cov(correction=0), "rootcov", ridge=1e-4)
        U, S, Vh = torch.linalg.svd(precond.apply(W), full_matrices=False)
        for i in (0, 7, 20):
            part, t = precond.undo(S[i] * U[:, i : i + 1] @ Vh[i : i + 1]), torch.zeros(()).requires_grad_()
            moved = {f"{path}.weight": W - t * part, f"{path}.bias": b + t * (part @ x.mean(0))}
            logits = torch.func.functional_call(model, moved, (ids,)).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / len(ids)
            (slope,) = torch.autograd.grad(loss, t)
            assert found[1][name][i] == pytest.approx(slope.item(), rel=1e-2, abs=1e-5), (name, i)


def share(remove: int, *modules: PrunableModule) -> Share:
    return Share(list(modules), remove, sum(m.dense for m in modules), "sparsity")


def test_the_rule_by_hand():
    """A 4 x 4 matrix and a 4 x 2: a rank costs 8 and 6, so both save nothing before rank 1."""
    a = PrunableModule(0, "q", (1, 4), (8, 16))
    b = PrunableModule(0, "o", (1, 2), (6, 8))
    changes = {a.key: [9.0, -0.5, 2.0, 1.0], b.key: [5.0, 1.5]}
    # Sum 0: of the rising ones q's last (1) is smaller than o's (1.5). Sum 1: none falls, so 1.5. Sum 2.5: q's next is
    # 2; o has no more to give. Sum 4.5: q's -0.5, and q is at rank 1.
    ranks, facts = ZeroSum().allocate(share(9, a, b), changes)
    assert ranks == {a.key: 1, b.key: 1} and facts == {"expected_loss_change": 4.0}
    # Two are saved with o's alone.
    ranks, facts = ZeroSum().allocate(share(2, a, b), changes)
    assert ranks == {a.key: 4, b.key: 1} and facts == {"expected_loss_change": 2.5}


def test_signs_alternate_where_both_are_there():
    """A hundred modules of rank 2, each with one value to lose: the sum stays within the largest change."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, generator=generator).tolist()
    modules = [PrunableModule(i, "q", (1, 2), (4, 6)) for i in range(100)]
    changes = {m.key: [1.0, value] for m, value in zip(modules, values, strict=True)}
    ranks, facts = ZeroSum().allocate(share(60, *modules), changes)
    gone = sorted((abs(values[m.block]), m.block) for m in modules if ranks[m.key] == 1)
    assert len(gone) == 30 and abs(facts["expected_loss_change"]) <= max(size for size, _ in gone)
    assert facts["expected_loss_change"] == pytest.approx(sum(values[block] for _, block in gone))
    signs = [values[block] > 0 for _, block in gone]
    assert 10 <= sum(signs) <= 20


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_whole_model_loses_what_was_asked_and_the_sum_is_in_the_record(family):
    source = opened(family)
    options = {"method": "zs-svd", "sparsity": 0.3, "rank_multiple": 1, "calibration": tokens()}
    plan = rankfold.compress(source, mode="one-pass", **options).plan
    again = rankfold.compress(source, **options).plan  # whose factors are others, and whose ranks are not
    assert [m.rank for m in again.modules] == [m.rank for m in plan.modules]
    assert 0.3 <= plan.sparsity < 0.31
    assert len({m.rank / m.of for m in plan.modules}) > 2  # no uniform share
    names = {m.module for m in plan.modules}
    assert {"q", "v", "o", "up", "down"} <= names


def test_what_it_takes():
    source = opened("llama")
    assert isinstance(from_text(Allocation, "zero-sum", {"zero-sum": ZeroSum}), ZeroSum)
    with pytest.raises(OptionError, match="takes allocation zero-sum, got uniform"):
        rankfold.make_method("zs-svd", allocation="uniform")
    with pytest.raises(OptionError, match="gradients are measured on text"):
        rankfold.plan(source, method="zs-svd", sparsity=0.3)
    with pytest.raises(OptionError, match="goes by moments and gradients of the dense model, and there are none"):
        rankfold.plan(source, method="zs-svd", sparsity=0.3, calibration=tokens())
