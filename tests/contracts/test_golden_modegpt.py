"""MoDeGPT (arXiv:2408.09632) as its paper prints it, computed on whole models.

Matrix roots, pseudo-inverses and singular vectors in fp64, no moments, nothing of rankfold. ``selection=leverage
selection_qk=norm gqa=paper qk=cr`` must stay that. The reference keeps the shapes of the dense model, with zeros in
place of what goes, and so it is run like any other model.

Shape legend: n tokens, d model width, F hidden width of the MLP, H query heads, K key/value heads, h head dimension, k
rank. The paper's weights are ``(in, out)``; here ``W`` is ``(out, in)``.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, look, member
from families import some_ids, tiny_model, tokens
from rankfold import MoDeGPT
from rankfold.allocation import Influence

PAPER = {"selection": "leverage", "selection_qk": "norm", "gqa": "paper", "qk": "cr", "bias_refit": False}
RIDGE = 1e-6  # so small that damping the fit does not show
GATE, UP = ("mlp.gate_proj",), ("mlp.up_proj", "fc1")
FAMILIES = ["llama", "llama-mha-tied", "opt"]  # grouped queries, every head by itself, nothing that turns
HEAD_DIM = 8


def dense_model(family: str) -> nn.Module:
    """In fp64; values without a bias, for the paper knows none there."""
    model = tiny_model(family).double()
    for block in blocks_of(model):
        if (bias := member(block, ATTENTION).v_proj.bias) is not None:
            nn.init.zeros_(bias)
    return model


def root(C: Tensor) -> Tensor:
    values, U = torch.linalg.eigh(C)
    return (U * values.clamp_min(0).sqrt()) @ U.T


@torch.no_grad()
def inputs_of(model: nn.Module, ids: Tensor, module: nn.Module) -> Tensor:
    """``(n, in)`` rows that a module of the model receives."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    model(ids, use_cache=False)
    hook.remove()
    return seen[0]


def algorithm_1(A: Tensor, W_D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Units that stay, and the down projection ``(d, k)``; ``A`` (n, F) are the activations."""
    C = A.T @ A
    lam = RIDGE * C.diagonal().mean()
    scores = (C @ torch.linalg.inv(C + lam * torch.eye(len(C)).to(C))).diagonal()
    S = torch.eye(len(C)).to(C)[:, scores.topk(k).indices.sort().values]  # (F, k)
    fitted = torch.linalg.pinv(S.T @ C @ S) @ S.T @ C @ W_D.T
    return S.argmax(0), fitted.T


def algorithm_2(q: Tensor, key: Tensor, k: int, turning: bool) -> Tensor:
    """Dimensions of a key head that stay; queries ``(G, n, h)`` of its group (App. B.1), keys ``(n, h)``, both rotated.

    Where rotary embedding turns ``i`` with ``i + h/2`` both stay or both go, by the sum of their scores.
    """
    key_norms = root(key.T @ key).norm(dim=0)
    scores = sum(root(one.T @ one).norm(dim=0).square() * key_norms.square() for one in q).sqrt()  # (h,)
    if not turning:
        return scores.topk(k).indices.sort().values
    half = len(scores) // 2
    pairs = (scores[:half] + scores[half:]).topk(k // 2).indices.sort().values
    return torch.cat([pairs, pairs + half])


def algorithm_3(X: Tensor, W_V: Tensor, W_O: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values ``(k, d)`` and outputs ``(G, d, k)`` of one value head; ``W_V`` (h, d), ``W_O`` (G, d, h).

    Alone it is lines 3 to 5; in a group App. B.1: only the first decomposition, whose right singular vectors do for the
    values and for all outputs (the paper prints ``U``, which does not multiply, and the SVD of ``C W_V``).
    """
    C = root(X.T @ X)
    U, S, Vh = torch.linalg.svd(C @ W_V.T, full_matrices=False)
    if len(W_O) > 1:
        return Vh[:k] @ W_V, W_O @ Vh[:k].T
    U2, S2, Vh2 = torch.linalg.svd(torch.diag(S) @ Vh @ W_O[0].T, full_matrices=False)
    return (torch.linalg.inv(C) @ U @ U2[:, :k]).T, (torch.diag(S2[:k]) @ Vh2[:k]).T[None]


@torch.no_grad()
def reduce_block(model: nn.Module, source: nn.Module, ids: Tensor, index: int, ranks: dict[str, int]) -> None:
    """Algorithms 1 to 3 on a block of ``model``, measured on ``source``, which has the same dense block there."""
    block, seen = blocks_of(model)[index], look(source, ids, index)
    there, here = (member(blocks_of(m)[index], ATTENTION) for m in (source, model))
    X = inputs_of(source, ids, there.v_proj)
    H, K = seen.heads.query.shape[1], seen.heads.key.shape[1]
    queries = seen.heads.query.transpose(0, 1).flatten(1, 2).unflatten(0, (K, H // K))  # (K, G, n, h)
    keys = seen.heads.key.transpose(0, 1).flatten(1, 2)  # (K, n, h)
    output = member(here, OUTPUT)
    W_q, W_k, W_v = (p.weight.view(K, -1, HEAD_DIM, p.in_features) for p in (here.q_proj, here.k_proj, here.v_proj))
    W_o = output.weight.view(output.out_features, K, H // K, HEAD_DIM).permute(1, 2, 0, 3)  # (K, G, d, h)
    for g in range(K):
        gone = torch.ones(HEAD_DIM, dtype=torch.bool)
        gone[algorithm_2(queries[g], keys[g], ranks["qk"], hasattr(model.config, "rope_parameters"))] = False
        W_q[g][:, gone], W_k[g][:, gone] = 0, 0
        for projection in (here.q_proj, here.k_proj):
            if projection.bias is not None:
                projection.bias.view(K, -1, HEAD_DIM)[g][:, gone] = 0
        values, outputs = algorithm_3(X, W_v[g, 0].clone(), W_o[g].clone(), ranks["vo"])
        W_v[g], W_o[g] = 0, 0
        W_v[g, 0, : ranks["vo"]], W_o[g][..., : ranks["vo"]] = values, outputs
    down = member(block, DOWN)
    keep, fitted = algorithm_1(seen.hidden, down.weight, ranks["mlp"])
    gone = torch.ones(down.in_features, dtype=torch.bool).scatter(0, keep, False)
    for projection in (member(block, GATE), member(block, UP)):
        if projection is not None:
            projection.weight[gone] = 0
            if projection.bias is not None:
                projection.bias[gone] = 0
    down.weight.zero_()
    down.weight[:, keep] = fitted


def reference(family: str, ranks: list[dict[str, int]], mode: str) -> nn.Module:
    dense = dense_model(family)
    model = copy.deepcopy(dense)
    for index, of_block in enumerate(ranks):
        reduce_block(model, copy.deepcopy(model) if mode == "sequential" else dense, tokens().ids, index, of_block)
    return model


def compressed(family: str, mode: str, **options):
    source = rankfold.open_model(dense_model(family), device="cpu")
    source.autocast = None
    method, plans = MoDeGPT(**PAPER, ridge=RIDGE, **options), []
    small = rankfold.compress(source, method=method, calibration=tokens(), mode=mode, on_plan=plans.append).model
    return small, plans[0]


def left(weight: Tensor) -> Tensor:
    """Rows that are not zero."""
    return weight[weight.any(1)]


@torch.no_grad()
def assert_same_tensors(small: nn.Module, expected: nn.Module) -> None:
    """Up, gate and down, queries and keys; of values and outputs, with a free basis, the product of each head."""
    for ours, theirs in zip(blocks_of(small), blocks_of(expected), strict=True):
        for names in (GATE, UP):
            if (projection := member(theirs, names)) is not None:
                torch.testing.assert_close(member(ours, names).weight, left(projection.weight))
        close = {"rtol": 1e-4, "atol": 5e-5}  # fp32 forwards of other processors end in other digits
        torch.testing.assert_close(member(ours, DOWN).weight, left(member(theirs, DOWN).weight.T).T, **close)
        mine, other = (member(block, ATTENTION) for block in (ours, theirs))
        for name in ("q_proj", "k_proj"):  # the order of dimensions in a head is free where nothing turns them
            found, wanted = (getattr(a, name).weight for a in (mine, other))
            distance = torch.cdist(left(wanted), found)
            assert len(found) == distance.shape[0] and distance.min(1).values.max() < 1e-9
        v, o = mine.v_proj.weight, mine.o_proj.weight
        heads, size = len(other.v_proj.weight) // HEAD_DIM, mine.vo_dim
        groups = other.q_proj.out_features // HEAD_DIM // heads
        v, o = v.view(heads, 1, size, -1), o.view(len(o), heads, groups, size).permute(1, 2, 0, 3)
        W_v = other.v_proj.weight.view(heads, 1, HEAD_DIM, -1)
        W_o = member(other, OUTPUT).weight.view(o.shape[2], heads, groups, HEAD_DIM).permute(1, 2, 0, 3)
        torch.testing.assert_close(o @ v, W_o @ W_v, **close)


@torch.no_grad()
def assert_same_function(small: nn.Module, expected: nn.Module) -> None:
    for ids in (tokens().ids, some_ids(seed=5)):
        torch.testing.assert_close(small(ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["sequential", "one-pass"])
@pytest.mark.parametrize("family", FAMILIES)
def test_algorithms_1_to_3_as_printed(family, mode):
    sparsities = {"mlp": 0.25, "qk": 0.5, "vo": 0.25}
    small, plan = compressed(family, mode, modules=sparsities, rank_multiple=1)
    hidden = member(blocks_of(dense_model(family))[0], DOWN).in_features
    full = {"mlp": hidden, "qk": HEAD_DIM, "vo": HEAD_DIM}
    ranks = {module: math.ceil((1 - sparsity) * full[module]) for module, sparsity in sparsities.items()}
    assert [plan.ranks(index) for index in range(3)] == [ranks] * 3
    expected = reference(family, [ranks] * 3, mode)
    assert_same_tensors(small, expected)
    assert_same_function(small, expected)
    with torch.no_grad():  # what is compared is far from the dense model
        gap = small(tokens().ids).logits - dense_model(family)(tokens().ids).logits
    assert gap.norm() > 0.1 * small(tokens().ids).logits.norm()


@torch.no_grad()
def equation_11(family: str, average: float, epsilon: float) -> list[float]:
    """``phi = L phi_avg softmax(-s / epsilon)`` with ``s = 1 - E cos(x_in, x_out)`` of every block."""
    model, streams = dense_model(family), []

    def around(_, args, kwargs, out):
        given = args[0] if args else kwargs["hidden_states"]
        streams.append((given, out[0] if isinstance(out, tuple) else out))

    for block in blocks_of(model):
        block.register_forward_hook(around, with_kwargs=True)
    model(tokens().ids, use_cache=False)
    s = torch.stack([1 - torch.cosine_similarity(x, y, dim=-1).mean() for x, y in streams])
    return (len(s) * average * torch.softmax(-s / epsilon, 0)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_sparsities_of_layers_are_equation_11(family):
    epsilon = 0.3
    small, plan = compressed(
        family, "one-pass", sparsity=0.3, allocation=Influence(temperature=epsilon), rank_multiple=1
    )
    expected = equation_11(family, 0.3, epsilon)
    assert max(expected) - min(expected) > 0.1
    ranks = [plan.ranks(index) for index in range(3)]
    for index, phi in enumerate(expected):
        modules = [m for m in plan.modules if m.block == index]
        weights = sum(m.dense_weights for m in modules)
        step = max(m.dense_weights / m.of for m in modules) * 2 / weights  # attention is rounded by pairs of dimensions
        assert 1 - sum(m.weights for m in modules) / weights == pytest.approx(phi, abs=step)
    assert_same_function(small, reference(family, ranks, "one-pass"))
