"""What MoDeGPT installs, against straightforward dense code on raw activations of the same block.

Nothing of rankfold is used for the references: activations come from hooks on transformers' modules, fits from least
squares and singular values on them. Every family, every block, both modes.

Shape legend: n tokens, B windows, T tokens of a window, F hidden width of the MLP, R kept width, D model width, H query
heads, K key/value heads, G = H / K, N head dimension.
"""

import itertools
import json
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, UP, Heads, blocks_of, look, member, spliced, weight_of
from families import ALIKE, CONFIGS, ELIMINATION, EXPERTS, NORMED, ONE_SHOT, tiny_model, tokens
from rankfold import MoDeGPT

FREE = {"opt", "opt-post-norm", "gpt2", "gpt_neo", "falcon-alibi", "bloom", "mpt"}  # nothing turns queries and keys
STILL = {("smollm3", 1), ("cohere2", 2), ("exaone4", 2)}  # nor do these blocks
HALF = ("phi", "gpt_neox", "glm", "glm4", "stablelm", "stablelm-parallel", "nemotron")
ROTARY = dict.fromkeys((*HALF, "gptj"), 4) | {"gpt_neox-sequential": 2}  # of 8 dimensions; elsewhere all
GPTJ_ROPE = {"ernie4_5", "helium", "cohere", "cohere2", "glm", "glm4", "gptj"}
SCALE = {
    "gemma2": 256,
    "gemma3": 256,
    "gemma3-images": 256,
    "granite": 0.3**-2,
    "granitemoe": 0.3**-2,
    "gpt_neo": 1,
}  # under the root of what scores are divided by; elsewhere the head dimension
SINKS = {"gpt_oss"}  # a shift of all scores of a query counts, and values are not averaged
PAPER = {"gqa": "paper", "bias_refit": False, "qk": "cr", **ONE_SHOT}
SETTINGS = {
    "elimination, sequential": (ELIMINATION, "sequential"),
    "elimination, one-pass": (ELIMINATION, "one-pass"),
    "one-shot, sequential": (ONE_SHOT, "sequential"),
    "paper, one-pass": (PAPER, "one-pass"),
    "elimination without rotary, one-pass": ({**ELIMINATION, "qk": "cr"}, "one-pass"),
}
RIDGE = 1e-2  # large enough that the fit shows whether it is there
CLOSE = 1e-3  # moments are products in fp32
CASES = [
    (family, setting)
    for family in sorted(CONFIGS)
    for setting in (SETTINGS if family not in ALIKE else ["elimination, sequential"])
    if "without" not in setting or family in FREE
]


class Block(NamedTuple):
    """One block: dense on the stream it was measured on, and compressed on the same stream; or on held-out windows."""

    family: str
    method: MoDeGPT
    dense: torch.nn.Module
    small: torch.nn.Module
    heads: Heads
    small_heads: Heads
    hidden: Tensor | None  # (n, F)
    report: dict
    # (B, H, T, 1) and (B, K, T, 1): what compressed norms divide by too little; `small_heads` are without it
    factors: tuple[Tensor, Tensor] | None = None
    held_out: "Block | None" = None


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}: {case[1]}")
def blocks(request, tmp_path_factory) -> list[Block]:
    family, setting = request.param
    options, mode = SETTINGS[setting]
    sparsities = {"mlp": 0.05 if family in ("bloom", "mpt") else 0.25, "qk": 0.5, "vo": 0.4}  # four times the units
    modules = {name: value for name, value in sparsities.items() if name != "mlp" or family not in EXPERTS}
    method = MoDeGPT(modules=modules, rank_multiple=2, ridge=RIDGE, **options)
    model = tiny_model(family)
    dense = model if family in EXPERTS else model.double()  # grouped products of experts have no fp64
    source = rankfold.open_model(dense, device="cpu")
    source.autocast = None
    folder = rankfold.compress(
        source, method=method, calibration=tokens(), output=tmp_path_factory.mktemp("truth") / "small", mode=mode
    ).output
    record = json.loads((folder / "rankfold.json").read_text())
    models = dense, rankfold.load(folder, device="cpu")
    return [seen_block(family, method, *models, index, mode, record["blocks"][str(index)]) for index in range(3)]


def seen_block(family, method, dense, small, index: int, mode: str, report: dict) -> Block:
    before = range(index) if mode == "sequential" else ()

    def on(ids: Tensor) -> Block:
        seen = look(spliced(dense, small, before), ids, index)
        after = look(spliced(dense, small, (*before, index)), ids, index)
        heads = (Heads(*(x.double() for x in s.heads)) for s in (seen, after))
        hidden = None if seen.hidden is None else seen.hidden.double()
        block = Block(family, method, *(blocks_of(m)[index] for m in (dense, small)), *heads, hidden, report)
        return with_known_norms(block) if family in NORMED else block

    return on(tokens().ids)._replace(held_out=on(tokens().held_out))


def with_known_norms(block: Block) -> Block:
    """What is left of normalised queries and keys is the dense one times a factor of every token and head."""
    rank, factors, restored = block.report["qk"]["rank"], [], []
    for name, dense, small in zip(("q_proj", "k_proj"), block.heads, block.small_heads, strict=False):
        whole, kept = (member(getattr(b, ATTENTION[0]), (name,)).weight.detach() for b in (block.dense, block.small))
        heads, N = dense.shape[1], dense.shape[-1]
        rows = torch.cdist(kept.view(heads, rank, -1), whole.view(heads, N, -1)).argmin(-1)  # (heads, R)
        expected = dense.gather(3, rows[None, :, None].expand(len(dense), -1, dense.shape[2], -1))
        factor = (small[..., :rank] * expected).sum(-1, keepdim=True) / expected.square().sum(-1, keepdim=True)
        torch.testing.assert_close(small[..., :rank], factor * expected, rtol=CLOSE, atol=1e-5)
        factors.append(factor)
        restored.append(small / factor)
    return block._replace(
        factors=tuple(factors), small_heads=block.small_heads._replace(query=restored[0], key=restored[1])
    )


CHECKS = []


def check(function):
    """Hold it of every block of every case."""
    CHECKS.append(function)
    return function


def test_what_is_installed_is_what_dense_code_gives(blocks, subtests):
    for (index, block), holds in itertools.product(enumerate(blocks), CHECKS):
        with subtests.test(block=index, check=holds.__name__):
            holds(block)


def needs(block: Block, module: str) -> None:
    if module not in block.report:
        pytest.skip(f"{block.family} does not allow {module}: its MLP is made of experts")


def ratio(error: Tensor, total: Tensor) -> float:
    """Relative error of sums of squares."""
    return (error.square().sum() / total.square().sum()).sqrt().item()


def singular_values(X: Tensor, Y: Tensor) -> Tensor:
    """Of ``X Y^T``, by triangular factors, since ``X`` and ``Y`` are tall."""
    return torch.linalg.svdvals(torch.linalg.qr(X).R @ torch.linalg.qr(Y).R.T)


# ---------------------------------------------------------------------------------------------------------------------
# MLP


def projection(block: torch.nn.Module, names) -> tuple[Tensor, Tensor | None]:
    module = member(block, names)
    return weight_of(module).double(), None if module.bias is None else module.bias.detach().double()


def kept_units(block: Block) -> Tensor:
    """``(R,)`` rows of the dense up projection that are still there, in order, gate and biases with them."""
    (dense, bias), (small, small_bias) = projection(block.dense, UP), projection(block.small, UP)
    rows = torch.cdist(small, dense).argmin(1)
    torch.testing.assert_close(small, dense[rows])
    if bias is not None:
        torch.testing.assert_close(small_bias, bias[rows])
    hidden, fused = block.hidden.shape[1], len(dense) > block.hidden.shape[1]
    if fused:  # [gate; up]
        rows, second = rows.chunk(2)
        assert torch.equal(second, rows + hidden)
    elif gate := member(block.dense, ("mlp.gate_proj",)):
        torch.testing.assert_close(weight_of(member(block.small, ("mlp.gate_proj",))), weight_of(gate)[rows])
    assert len(rows.unique()) == len(rows) == block.report["mlp"]["rank"] < hidden
    return rows


def refitted(block: Block) -> bool:
    """Whether the bias of the down projection takes the mean."""
    return block.method.bias_refit and projection(block.dense, DOWN)[1] is not None


def fitted_activations(block: Block) -> Tensor:
    return block.hidden - block.hidden.mean(0) if refitted(block) else block.hidden


def damping(activations: Tensor) -> Tensor:
    """``(F, F)`` rows which, put below the activations, make least squares a ridge regression."""
    n, F = activations.shape
    return (n * RIDGE * activations.square().mean()).sqrt() * torch.eye(F, dtype=activations.dtype)


@check
def the_down_projection_is_the_ridge_fit_on_the_kept_units(block):
    needs(block, "mlp")
    keep, a, (W, b) = kept_units(block), fitted_activations(block), projection(block.dense, DOWN)
    dropped = [unit for unit in range(a.shape[1]) if unit not in set(keep.tolist())]
    rows = torch.cat([a[:, keep], damping(a)[: len(keep), : len(keep)]])
    lost = torch.cat([a[:, dropped] @ W[:, dropped].T, torch.zeros(len(keep), len(W), dtype=a.dtype)])
    expected = W[:, keep] + torch.linalg.lstsq(rows, lost).solution.T
    found, bias = projection(block.small, DOWN)
    assert ratio(found - expected, expected - W[:, keep]) < CLOSE * 10
    if b is None:
        assert bias is None
    elif refitted(block):
        torch.testing.assert_close(bias, b + W @ block.hidden.mean(0) - found @ block.hidden[:, keep].mean(0))
    else:
        torch.testing.assert_close(bias, b)


def mlp_errors(block: Block, there: Block) -> tuple[Tensor, Tensor]:
    """``(n, D)`` change of the outputs in other windows, and these about the mean that the bias took."""
    keep, (W, b), (small, bias) = kept_units(block), projection(block.dense, DOWN), projection(block.small, DOWN)
    error = there.hidden @ W.T - there.hidden[:, keep] @ small.T
    if b is not None:
        error += b - bias
    return error, (there.hidden - (block.hidden.mean(0) if refitted(block) else 0)) @ W.T


@check
def the_mlp_error_reported_is_that_of_its_outputs(block):
    needs(block, "mlp")
    error, total = mlp_errors(block, block)
    if refitted(block):
        scale = error.square().mean().sqrt()
        assert error.mean(0).abs().max() < CLOSE * scale, "the mean output changed"
    assert block.report["mlp"]["relative_error"] == pytest.approx(ratio(error, total), rel=CLOSE)
    assert block.report["mlp"]["error"] == pytest.approx(error.square().sum(1).mean().item(), rel=2 * CLOSE)


@check
def the_mlp_error_in_held_out_windows_is_that_of_its_outputs_there(block):
    needs(block, "mlp")
    errors = mlp_errors(block, block.held_out)
    assert block.report["mlp"]["held_out_error"] == pytest.approx(ratio(*errors), rel=CLOSE)


@check
def the_bounds_of_the_mlp_are_those_of_the_papers_formulas(block):
    """Spectral norms are estimated from above, each within 1 %."""
    needs(block, "mlp")
    keep, a, W, report = (
        kept_units(block),
        fitted_activations(block),
        projection(block.dense, DOWN)[0],
        block.report["mlp"],
    )
    rows = torch.cat([a, damping(a)]) / len(a) ** 0.5
    C, dropped = rows.T @ rows, [unit for unit in range(a.shape[1]) if unit not in set(keep.tolist())]
    schur = C - C[:, keep] @ torch.linalg.solve(C[keep][:, keep], C[keep])
    theorem = torch.linalg.matrix_norm(W, 2) ** 2 * torch.linalg.matrix_norm(C.inverse(), 2) * schur.square().sum()
    assert (1 - CLOSE) * theorem <= report["theorem_1"] <= 1.02 * theorem
    epsilon = (torch.linalg.solve(C, a.T @ a).diagonal() / len(a))[dropped].sum().item()
    assert report["epsilon"] == pytest.approx(epsilon, rel=CLOSE)
    if epsilon >= 1:
        assert report["proposition_1"] is None
        return
    lam = RIDGE * a.square().mean()
    proposition = lam * epsilon / (1 - epsilon) * torch.linalg.matrix_norm(W[:, dropped], 2) ** 2
    assert (1 - CLOSE) * proposition <= report["proposition_1"] <= 1.02 * proposition


def errors_of_fits(C: Tensor, W: Tensor, kept: Tensor) -> Tensor:
    """``(m,)`` squared error of the best refit on each of ``m`` sets ``kept`` ``(m, R)`` of units; plain formula."""
    cross = C[kept]  # (m, R, F)
    inner = cross.gather(2, kept[:, None].expand(-1, kept.shape[1], -1))
    fit = torch.linalg.solve(inner, cross)  # what stands in for every unit
    return torch.einsum("df,mfe,de->m", W, C - cross.mT @ fit, W)


def naive_elimination(C: Tensor, W: Tensor, rank: int) -> Tensor:
    """``(R,)``: leave out, again and again, the unit whose loss hurts least after refitting all the others."""
    kept = torch.arange(len(C))
    while len(kept) > rank:
        without = torch.stack([torch.cat([kept[:i], kept[i + 1 :]]) for i in range(len(kept))])
        kept = without[errors_of_fits(C, W, without).argmin()]
    return kept


@check
def the_units_that_stay_are_those_the_option_says(block):
    needs(block, "mlp")
    assert block.report["mlp"]["selection"] == block.method.selection
    keep, a, W = kept_units(block), fitted_activations(block), projection(block.dense, DOWN)[0]
    rows = torch.cat([a, damping(a)])
    C = rows.T @ rows
    if block.method.selection == "leverage":
        scores = torch.linalg.solve(C, a.T @ a).diagonal()
        assert scores[keep].sum().item() == pytest.approx(scores.topk(len(keep)).values.sum().item(), rel=1e-6)
        return
    found, naive = errors_of_fits(C, W, torch.stack([keep, naive_elimination(C, W, len(keep))])).sqrt()
    assert found <= 1.01 * naive


# ---------------------------------------------------------------------------------------------------------------------
# Query-key


def turning(block: Block) -> int:
    """How many dimensions of a head rotary embedding turns."""
    still = block.family in FREE or (block.family, getattr(member(block.dense, ATTENTION), "layer_idx", 0)) in STILL
    return 0 if still else ROTARY.get(block.family, block.heads.query.shape[-1])


def selects(block: Block) -> bool:
    return turning(block) > 0 or block.method.qk == "cr" or block.family in NORMED


def kept_dimensions(block: Block) -> Tensor:
    """``(K, R)`` dimensions of every key head that are still there, in the queries of its group too."""
    q, k = block.heads.query, block.heads.key
    small_q, small_k = (x[..., : block.report["qk"]["rank"]] for x in block.small_heads[:2])  # kernels want padding
    distance = (k[..., :, None] - small_k[..., None, :]).abs().amax((0, 2))  # (K, N, R)
    keep = distance.argmin(1)
    each = keep.repeat_interleave(q.shape[1] // k.shape[1], 0)
    for dense, small, index in ((k, small_k, keep), (q, small_q, each)):
        expected = dense.gather(3, index[None, :, None].expand(*dense.shape[:1], -1, dense.shape[2], -1))
        torch.testing.assert_close(small, expected, rtol=CLOSE, atol=1e-5)
    return keep


def expanded(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values, once for every query head."""
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def centred(block: Block, scores: Tensor) -> Tensor:
    """A shift of all scores of a query leaves softmax as it is."""
    return scores if block.family in SINKS else scores - scores.mean(-1, keepdim=True)


def scores_of(block: Block, heads: Heads) -> Tensor:
    """``(B, H, T, T)`` every query of a window with every key of it."""
    return centred(block, heads.query @ expanded(heads.key, heads.query).mT)


def unscaled(block: Block, squares: Tensor | float) -> Tensor | float:
    """Squared scores before softmax's scale."""
    return squares * SCALE.get(block.family, block.heads.query.shape[-1])


@check
def the_score_error_reported_is_that_of_a_selection(block):
    needs(block, "qk")
    if not selects(block):
        pytest.skip("nothing turns queries and keys here: another test looks at the fit")
    dense, small = scores_of(block, block.heads), scores_of(block, block.small_heads)
    (B, _, T, _), report = dense.shape, block.report["qk"]
    assert (report["form"], report["selection"]) == ("cr", block.method.selection_qk)
    assert report["relative_error"] == pytest.approx(ratio(dense - small, dense), rel=CLOSE)
    error = unscaled(block, (dense - small).square().sum()) / (B * T**2)
    assert report["error"] == pytest.approx(error.item(), rel=2 * CLOSE)


@check
def the_norm_errors_reported_are_those_of_what_is_divided_by(block):
    needs(block, "qk")
    if block.factors is None:
        pytest.skip(f"{block.family} does not normalise queries and keys")
    errors = [(1 - factor**-2).square().mean().sqrt().item() for factor in block.factors]
    assert errors == pytest.approx([block.report["qk"][f"{name}_norm_error"] for name in ("query", "key")], rel=CLOSE)
    others = [(1 - factor**-2).square().mean().sqrt().item() for factor in block.held_out.factors]
    assert min(errors) > 0 and max(others) < 1, "not predicted at all"


@check
def the_score_error_in_held_out_windows_is_that_of_the_scores_there(block):
    needs(block, "qk")
    there, rank = block.held_out, block.report["qk"]["rank"]
    if selects(block):
        dense, small = scores_of(there, there.heads), scores_of(there, there.small_heads)
        expected = ratio(dense - small, dense)
    else:
        error, total, _ = score_errors(there, rank)
        expected = (error / total) ** 0.5
    assert block.report["qk"]["held_out_error"] == pytest.approx(expected, rel=CLOSE)


@check
def the_bounds_of_a_selection_are_those_of_the_papers_formulas(block):
    needs(block, "qk")
    if not selects(block):
        pytest.skip("nothing is selected")
    (B, H, T, N), K = block.heads.query.shape, block.heads.key.shape[1]
    keep, q, k = kept_dimensions(block), block.heads.query.view(B, K, H // K, T, N), block.heads.key
    C_q, C_k = torch.einsum("bkgtn,bkgtm->knm", q, q), torch.einsum("bktn,bktm->knm", k, k)
    theorem = proposition = 0.0
    for head in range(K):
        dropped = [i for i in range(N) if i not in set(keep[head].tolist())]
        theorem += (C_q * C_k)[head][dropped][:, dropped].sum()
        proposition += (len(dropped) / N) ** 2 * C_q[head].trace() * C_k[head].trace()
    for name, bound in (("theorem_2", theorem), ("proposition_2", proposition)):
        expected = unscaled(block, bound).item() / (B * T**2)
        assert block.report["qk"][name] == pytest.approx(expected, rel=CLOSE), name


def score_errors(block: Block, rank: int) -> tuple[float, float, float]:
    """Squared change of the scores of queries with keys of all windows; squared scores; what a rank cannot reach."""
    error = total = best = 0.0
    K = block.heads.key.shape[1]
    for head in range(K):
        q, k, small_q, small_k = (
            x.unflatten(1, (K, -1))[:, head].flatten(0, 2)  # queries of all heads that read this key head
            for heads in (block.heads, block.small_heads)
            for x in (heads.query, heads.key - heads.key.mean(2, keepdim=True))  # softmax ignores what all keys share
        )
        error += (q @ k.T - small_q @ small_k.T).square().sum().item()
        spectrum = singular_values(q, k).square()
        best, total = best + spectrum[rank:].sum().item(), total + spectrum.sum().item()
    return error, total, best


@check
def scores_without_rotary_embedding_are_the_best_of_their_rank(block):
    needs(block, "qk")
    if selects(block):
        pytest.skip("a selection: another test looks at it")
    report, (B, _, T, _) = block.report["qk"], block.heads.query.shape
    error, total, best = score_errors(block, report["rank"])
    assert report["form"] == "svd"
    assert report["relative_error"] == pytest.approx((error / total) ** 0.5, rel=CLOSE)
    assert report["error"] == pytest.approx(unscaled(block, error) / (B * T) ** 2, rel=2 * CLOSE)
    assert error == pytest.approx(best, rel=CLOSE)


def pairs_of(block: Block, scores: Tensor) -> list[tuple[int, int]]:
    """Dimensions that turn together; of the others the best two, the next two, and so on."""
    rotary, adjacent = turning(block), block.family in GPTJ_ROPE
    free = sorted(range(rotary, len(scores)), key=lambda i: -scores[i])
    turn = [(2 * p, 2 * p + 1) if adjacent else (p, p + rotary // 2) for p in range(rotary // 2)]
    return turn + list(zip(free[::2], free[1::2], strict=True))


def norm_scores(q: Tensor, k: Tensor) -> Tensor:
    """``(N,)`` of a key head: the paper's score, over the queries ``(B, G, T, N)`` of the group."""
    return (q.square().sum((0, 1, 2)) * k.square().sum((0, 1))).sqrt()


def dropping(block: Block, q: Tensor, k: Tensor, dims) -> float:
    """Squared change of all scores of a group without these dimensions."""
    return centred(block, q[..., dims] @ k[:, None, :, dims].mT).square().sum().item()


def greedy_pairs(block: Block, q: Tensor, k: Tensor, pairs, drop: int) -> float:
    """What dropping pairs one after the other costs, each time the one after which the scores are best."""
    gone, cost = [], 0.0
    for _ in range(drop):
        left = [pair for pair in pairs if pair[0] not in gone]
        cost, pair = min((dropping(block, q, k, [*gone, *pair]), pair) for pair in left)
        gone += pair
    return cost


@check
def the_pairs_that_stay_are_those_the_option_says(block):
    needs(block, "qk")
    if not selects(block):
        pytest.skip("nothing is selected")
    keep, (B, H, T, N), K = kept_dimensions(block), block.heads.query.shape, block.heads.key.shape[1]
    rotary = turning(block)
    for head in range(K):
        q, k = block.heads.query.view(B, K, H // K, T, N)[:, head], block.heads.key[:, head]
        scores, kept = norm_scores(q, k), set(keep[head].tolist())
        pairs = pairs_of(block, scores)
        assert all((a in kept) == (b in kept) for a, b in pairs[: rotary // 2]), "half a pair is gone"
        if block.method.selection_qk == "norm":
            best = sorted(pairs, key=lambda pair: -(scores[pair[0]] + scores[pair[1]]))[: len(kept) // 2]
            assert kept == set(itertools.chain(*best))
            continue
        # Dimensions that do not turn go one by one: no worse than the better of two ways to let them go two by two.
        in_order = pairs_of(block, -torch.arange(N))
        drop = (N - len(kept)) // 2
        naive = min(greedy_pairs(block, q, k, some, drop) for some in (pairs, in_order))
        assert dropping(block, q, k, [i for i in range(N) if i not in kept]) <= 1.01**2 * naive


# ---------------------------------------------------------------------------------------------------------------------
# Value-output


def output_projection(block: torch.nn.Module, heads: int) -> tuple[Tensor, Tensor | None]:
    """``(H, D, N)`` and the bias."""
    weight, bias = projection(member(block, ATTENTION), OUTPUT)
    return weight.unflatten(1, (heads, -1)).transpose(0, 1), bias


class ValueOutput(NamedTuple):
    """Values and output projections of a block, dense and compressed."""

    values: Tensor  # (K, n, N)
    small_values: Tensor  # (K, n, V)
    W_o: Tensor  # (H, D, N)
    small_W_o: Tensor  # (H, D, V)
    bias: Tensor | None
    small_bias: Tensor | None
    refit: bool  # the bias of the output projection takes the mean

    @property
    def fitted(self) -> Tensor:
        return self.values - self.values.mean(1, keepdim=True) if self.refit else self.values

    def outputs(self, there: "ValueOutput") -> tuple[Tensor, Tensor]:
        """``(H, n, D)`` of single heads in other windows, dense and compressed, without the mean that a bias took."""
        sent = []
        for values, fitted, W_o in (
            (there.values, self.values, self.W_o),
            (there.small_values, self.small_values, self.small_W_o),
        ):
            centre = fitted.mean(1, keepdim=True) if self.refit else 0
            sent.append(expanded((values - centre)[None], W_o[None])[0] @ W_o.mT)
        return tuple(sent)


def value_output(block: Block) -> ValueOutput:
    H, rank = block.heads.query.shape[1], block.report["vo"]["rank"]
    values = (x.transpose(0, 1).flatten(1, 2) for x in (block.heads.value, block.small_heads.value[..., :rank]))
    (W_o, bias), (small_W_o, small_bias) = (output_projection(b, H) for b in (block.dense, block.small))
    refit = block.method.bias_refit and bias is not None and block.family not in SINKS
    return ValueOutput(*values, W_o, small_W_o, bias, small_bias, refit)


@check
def the_value_output_error_reported_is_that_of_the_heads(block):
    vo, report = value_output(block), block.report["vo"]
    dense, small = vo.outputs(vo)
    assert report["relative_error"] == pytest.approx(ratio(dense - small, dense), rel=CLOSE)
    error = (dense - small).square().sum().item() / dense.shape[1]
    assert report["error"] == pytest.approx(error, rel=2 * CLOSE)


@check
def the_value_output_error_in_held_out_windows_is_that_of_the_heads_there(block):
    dense, small = value_output(block).outputs(value_output(block.held_out))
    assert block.report["vo"]["held_out_error"] == pytest.approx(ratio(dense - small, dense), rel=CLOSE)


@check
def value_output_reaches_the_optimum_of_its_form(block):
    vo = value_output(block)
    rank, K = vo.small_values.shape[-1], len(vo.values)
    dense, small = vo.outputs(vo)
    joint = paper = 0.0
    for X, W in zip(vo.fitted, vo.W_o.unflatten(0, (K, -1)).flatten(1, 2), strict=True):  # (n, N), (G D, N)
        joint += singular_values(X, W)[rank:].square().sum()
        directions = torch.linalg.svd(X, full_matrices=False).Vh[:rank]  # of C^1/2 W_v alone
        paper += ((X - X @ directions.T @ directions) @ W.T).square().sum()
    alone = len(vo.W_o) == K  # every query head has a value head: the paper's form is the optimum
    expected = joint if block.method.gqa == "joint" or alone else paper
    assert (dense - small).square().sum().item() == pytest.approx(expected.item(), rel=2 * CLOSE)
    assert block.report["vo"]["proposition_3"] == pytest.approx(joint.item() / dense.shape[1], rel=2 * CLOSE)
    assert alone or joint < (1 - 10 * CLOSE) * paper, "the two forms do not differ here"


@check
def value_output_keeps_the_mean_output(block):
    """Attention averages values, whatever its weights: the mean value must be sent as it was."""
    vo = value_output(block)
    if not vo.refit:
        assert (vo.bias is None) == (vo.small_bias is None)
        assert vo.bias is None or torch.equal(vo.bias, vo.small_bias)
        return
    groups = len(vo.W_o) // len(vo.values)
    dense, small = (
        torch.einsum("hdn,hn->d", W_o, values.mean(1).repeat_interleave(groups, 0)) + bias
        for W_o, values, bias in ((vo.W_o, vo.values, vo.bias), (vo.small_W_o, vo.small_values, vo.small_bias))
    )
    torch.testing.assert_close(small, dense, rtol=CLOSE, atol=1e-5)
