"""LatentLLM (arXiv:2505.18413) as its paper prints it, computed on whole models.

Matrix roots, all ``d x d`` products of heads and their singular vectors in fp64, no moments, nothing of rankfold.
``method latentllm`` must stay that. The reference writes the products of the factors into a model of the dense shapes,
and so it is run like any other model.

Shape legend: n tokens, d inputs, H query heads, K key heads, h head dimension, r rank, P pre-conditioner.
"""

import copy

import pytest
import torch
from test_golden_modegpt import inputs_of
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, member
from families import some_ids, tiny_model, tokens
from rankfold import LatentLLM

RIDGE = 1e-3
HEAD_DIM, BASE = 8, 1e4
WINDOW = 5
TWICE = 2  # alternations; more may end early, where the error has settled
RISING = {"gate": ("mlp.gate_proj",), "up": ("mlp.up_proj", "fc1")}
CASES = [  # rotated and grouped; the same with biases everywhere; nothing that turns, biases
    ("llama", "sequential"),
    ("llama", "one-pass"),
    ("llama-mha-tied", "sequential"),
    ("llama-bias", "sequential"),
    ("opt", "sequential"),
]


def projections(block: nn.Module) -> dict[str, nn.Module]:
    attention = member(block, ATTENTION)
    found = {name: getattr(attention, f"{name}_proj") for name in "qkv"} | {"o": member(attention, OUTPUT)}
    found |= {name: member(block, paths) for name, paths in RISING.items()} | {"down": member(block, DOWN)}
    return {name: module for name, module in found.items() if module is not None}


class Metric:
    """Sec. 3.2: ``P = (C + lambda I)^1/2`` of a layer's inputs, ``C`` the covariance where it has a bias (App. B.2)."""

    def __init__(self, X: Tensor, centred: bool):
        self.mean = X.mean(0) if centred else torch.zeros_like(X[0])
        C = (X - self.mean).T @ (X - self.mean) / len(X)
        values, U = torch.linalg.eigh(C + RIDGE * C.diagonal().mean() * torch.eye(len(C)).to(C))
        self.P, self.inverse = (U * values.sqrt()) @ U.T, (U / values.sqrt()) @ U.T


def equation_3(W: Tensor, metric: Metric, r: int) -> Tensor:
    """``svd_r[W P] P^+``: Eq. 6 and 7, whatever the junction."""
    U, S, V = torch.linalg.svd(W @ metric.P, full_matrices=False)
    return U[:, :r] @ torch.diag(S[:r]) @ V[:r] @ metric.inverse


def rotations(turning: bool) -> list[Tensor]:
    """``Theta_(n-m)`` of Eq. 174 for keys up to five positions before the query, as the paper suggests (App. F.3)."""
    if not turning:
        return [torch.eye(HEAD_DIM, dtype=torch.float64)]
    phi, found = BASE ** (-2 * torch.arange(HEAD_DIM // 2, dtype=torch.float64) / HEAD_DIM), []
    for offset in range(-WINDOW, 1):
        c, s = torch.diag((offset * phi).cos()), torch.diag((offset * phi).sin())
        found.append(torch.cat([torch.cat([c, -s], 1), torch.cat([s, c], 1)]))
    return found


def top(S: Tensor, r: int, mean: bool) -> Tensor:
    """``(r, d)`` leading eigenvectors; with a mean, whose direction comes last and is always kept (App. E.2)."""
    if not mean:
        return torch.linalg.eigh(S).eigenvectors.flip(1)[:, :r].T
    return torch.block_diag(torch.linalg.eigh(S[:-1, :-1]).eigenvectors.flip(1)[:, :r].T, torch.ones(1, 1).to(S))


def algorithm_1(q: nn.Linear, k: nn.Linear, metric: Metric, r_q: int, r_k: int, turning: bool) -> tuple[Tensor, Tensor]:
    """Weights of queries and keys with the joint SVD; with biases on ``[x; 1]``, grouped queries by App. E.3."""

    def heads(projection: nn.Linear) -> Tensor:  # (heads, h, d), or d + 1 with what the mean token gives
        W = projection.weight @ metric.P
        if q.bias is not None:
            W = torch.cat([W, (projection.weight @ metric.mean + projection.bias)[:, None]], 1)
        return W.unflatten(0, (-1, HEAD_DIM))

    W_q, W_k, mean = heads(q), heads(k), q.bias is not None
    group = len(W_q) // len(W_k)
    G = [W_q[i].T @ theta @ W_k[i // group] for i in range(len(W_q)) for theta in rotations(turning)]
    A_q = top(sum(g @ g.T for g in G), r_q, mean)
    for _ in range(TWICE):
        A_k = top(sum(g.T @ A_q.T @ A_q @ g for g in G), r_k, mean)
        A_q = top(sum(g @ A_k.T @ A_k @ g.T for g in G), r_q, mean)
    A_q, A_k = (A[:r, : len(metric.P)] for A, r in ((A_q, r_q), (A_k, r_k)))
    return tuple(p.weight @ metric.P @ A.T @ A @ metric.inverse for p, A in ((q, A_q), (k, A_k)))


def replace_weight(projection: nn.Linear, W: Tensor, metric: Metric) -> None:
    if projection.bias is not None:  # Eq. 45 and 121: right on average
        projection.bias += (projection.weight - W) @ metric.mean
    projection.weight.copy_(W)


@torch.no_grad()
def reduce_block(model: nn.Module, source: nn.Module, ids: Tensor, index: int, ranks: dict[str, int]) -> None:
    """A block of ``model``, measured on ``source``, which has the same dense block there."""
    dense, new = (projections(blocks_of(m)[index]) for m in (source, model))
    metrics = {name: Metric(inputs_of(source, ids, p), p.bias is not None) for name, p in dense.items()}
    turning = hasattr(model.config, "rope_parameters")
    W = dict(zip("qk", algorithm_1(new["q"], new["k"], metrics["q"], ranks["q"], ranks["k"], turning), strict=True))
    W |= {m: equation_3(new[m].weight, metrics[m], ranks[m]) for m in new if m not in W}
    for name, projection in new.items():
        replace_weight(projection, W[name], metrics[name])


def assert_block_identity(latent: nn.Module, W: Tensor) -> None:
    """Eq. 8 and 9 with pivots (Remark 4): ``A = [I | V_1^+ V_2]``, so ``B`` is columns of the product: ``r^2`` less."""
    pivots, others = latent.columns.long().split([latent.rank, W.shape[1] - latent.rank])
    assert latent.A.weight.numel() + latent.B.weight.numel() == latent.rank * sum(W.shape) - latent.rank**2
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(latent.B.weight, W[:, pivots], **close)
    torch.testing.assert_close(latent.A.weight, torch.linalg.pinv(W[:, pivots], rtol=1e-9) @ W[:, others], **close)


@pytest.mark.parametrize("family, mode", CASES)
@torch.no_grad()
def test_local_and_joint_forms_as_printed(family, mode):
    dense = tiny_model(family).double()
    source = rankfold.open_model(copy.deepcopy(dense), device="cpu")
    source.autocast = None
    method = LatentLLM(sparsity=0.3, rank_multiple=1, ridge=RIDGE, joint="qk", alternations=TWICE, window=WINDOW)
    small = rankfold.compress(source, method=method, calibration=tokens(), mode=mode).model
    model = copy.deepcopy(dense)
    for index, block in enumerate(blocks_of(small)):
        latents = projections(block)
        ranks, before = {name: latent.rank for name, latent in latents.items()}, projections(blocks_of(model)[index])
        assert all(rank < min(p.weight.shape) for rank, p in zip(ranks.values(), before.values(), strict=True))
        reduce_block(model, copy.deepcopy(model) if mode == "sequential" else dense, tokens().ids, index, ranks)
        for name, projection in projections(blocks_of(model)[index]).items():
            assert_block_identity(latents[name], projection.weight)
            if projection.bias is not None:
                torch.testing.assert_close(latents[name].bias, projection.bias, rtol=1e-3, atol=1e-4)
    for ids in (tokens().ids, some_ids(seed=5)):
        torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    assert (small(ids).logits - dense(ids).logits).norm() > 0.1 * dense(ids).logits.norm()
