"""Figures 7 to 16 of LatentLLM (arXiv:2505.18413): studies on random matrices, without a model.

Weights are normal. The moment of the inputs is a Wishart matrix of four samples a dimension, whose expectation is the
identity or ``0.9^|i-j|``; the paper leaves the number of samples open. Errors are relative squared errors in decibels.

    python benchmarks/random_matrices.py
    python benchmarks/random_matrices.py --figures 7 12 --width 128 --json out.json
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from math import log10
from typing import NamedTuple

import torch
from torch import Tensor

import common
from rankfold.linalg.joint_qk import joint_qk
from rankfold.linalg.lowrank import low_rank, metric_error
from rankfold.linalg.pair_error import Pair, pair_error
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.rotations import rope_rotations
from rankfold.linalg.sparse import low_rank_plus_sparse, sparse
from two_sided import TwoSided

DECAY = 0.9
RIDGE = 1e-9  # of roots: the moments here are well conditioned
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEW = (0.1, 0.3, 0.5, 0.7, 0.9)  # where every point iterates
ROPE_THETA, ROPE_WINDOW = 1e4, 10
DEFINITIONS = {
    "x": "figures 7, 10 and 12: rank over width; else numbers stored over numbers of the dense weights, "
    "indices not counted",
    "y": "10 log10 of the squared error over the squared norm: of outputs W x; figures 10 to 12: "
    "of all heads' score matrices",
    "seconds": "of the whole curve",
}
Curve = tuple[str, Iterable[tuple[float, float]]]


class Problem(NamedTuple):
    """Random weights and the moments of their inputs."""

    W: Tensor  # (d, d)
    correlated: Tensor  # (d, d)
    plain: Tensor  # (d, d)
    heads: int

    @property
    def width(self) -> int:
        return len(self.W)


def main() -> None:
    parser = common.arguments(__doc__, "random_matrices")
    parser.add_argument("--figures", type=int, nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--width", type=int, default=240, help="of all weights; the paper has 768")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = {"width": args.width, "heads": args.heads, "seed": args.seed, "decay": DECAY}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for figure in args.figures:
        run(record, figure, args)
    common.say(f"wrote {common.shown(str(args.json))}")


@torch.no_grad()
def run(record: common.Record, figure: int, args: argparse.Namespace) -> None:
    """Add the curves of one figure that the record lacks."""
    torch.manual_seed(args.seed + figure)
    start = time.perf_counter()
    for curve, points in FIGURES[figure](problem(args.width, args.heads)):
        if (name := f"{figure}: {curve}") in record:
            continue
        x, y = zip(*points, strict=True)
        seconds = time.perf_counter() - start
        record.add(name, figure=figure, curve=curve, x=x, y=[round(value, 3) for value in y], seconds=seconds)
        common.say(f"figure {name}")
        start = time.perf_counter()


def problem(width: int, heads: int) -> Problem:
    """Draw a problem."""
    return Problem(normal(width, width), wishart(width, DECAY), wishart(width, 0.0), heads)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def wishart(width: int, decay: float) -> Tensor:
    """Return the second moment of normal samples whose covariance is ``decay^|i-j|``."""
    i = torch.arange(width, dtype=torch.float64)
    covariance = torch.full((), decay, dtype=torch.float64) ** (i[:, None] - i).abs()
    X = torch.linalg.cholesky(covariance) @ normal(width, 4 * width)
    return X @ X.T / X.shape[1]


def db(relative_error: float) -> float:
    """Return decibels of a root mean square error."""
    return 20 * log10(max(relative_error, 1e-15))


def rank_of(share: float, width: int) -> int:
    return max(1, round(share * width))


def rank_storing(share: float, out: int, width: int) -> int:
    """Return the largest rank whose factors, with an identity block, store this share of the weight."""
    ranks = torch.arange(1, min(out, width) + 1)
    return int((ranks * (out + width - ranks) <= share * out * width).sum().clamp_min(1))


def heads_of(W: Tensor, heads: int) -> Tensor:
    return W.unflatten(0, (heads, -1))


def preconditioners(given: Problem) -> Iterator[Curve]:
    """Figure 7: which metric a low rank is fitted in."""
    W, C = given.W, given.correlated
    for name, kind in {"SVD": "identity", "l2": "l2", "covariance": "covariance", "root covariance": "rootcov"}.items():
        metric = preconditioner(C, kind, ridge=RIDGE)
        ranks = [rank_of(share, given.width) for share in SHARES]
        yield name, [(r / given.width, db(low_rank(W, metric, rank=r, C=C).relative_error)) for r in ranks]


def joint_qkv(given: Problem) -> Iterator[Curve]:
    """Figure 8: one latent for queries, keys and values, against one each."""
    d, C = given.width, given.correlated
    parts = [normal(d, d) for _ in range(3)]
    metric = preconditioner(C, "rootcov", ridge=RIDGE)

    def split(r: int) -> float:
        return db((sum(low_rank(W, metric, rank=r, C=C).relative_error ** 2 for W in parts) / 3) ** 0.5)

    def joint(r: int) -> float:
        return db(low_rank(torch.cat(parts), metric, rank=r, C=C).relative_error)

    ranks = [rank_of(share, d) for share in SHARES]
    yield "joint", [(r * 4 * d / (3 * d * d), joint(r)) for r in ranks if 4 * r < 3 * d]
    yield "split", [(2 * r / d, split(r)) for r in ranks if 2 * r < d]
    yield "joint, identity block", [(r * (4 * d - r) / (3 * d * d), joint(r)) for r in ranks]
    yield "split, identity block", [(r * (2 * d - r) / d**2, split(r)) for r in ranks]


def split_heads(given: Problem) -> Iterator[Curve]:
    """Figure 9: a low rank for every head, against one for all."""
    d, C = given.width, given.correlated
    metric, h = preconditioner(C, "rootcov", ridge=RIDGE), given.width // given.heads
    ranks = [rank_storing(share, d, d) for share in SHARES]
    yield (
        "joint heads",
        [(r * (2 * d - r) / d**2, db(low_rank(given.W, metric, rank=r, C=C).relative_error)) for r in ranks],
    )
    points = []
    for share in SHARES:
        r = rank_storing(share, h, d)
        errors = [low_rank(W, metric, rank=r, C=C).relative_error ** 2 for W in heads_of(given.W, given.heads)]
        points.append((r * (h + d - r) / (h * d), db((sum(errors) / given.heads) ** 0.5)))
    yield "split heads", points


class Scores(NamedTuple):
    """Queries and keys whose scores are approximated."""

    q: Tensor  # (H, h, d)
    k: Tensor
    C: Tensor
    rotations: Tensor | None = None

    def db(self, q: Tensor, k: Tensor) -> float:
        """Return the error of the scores of other queries and keys."""
        dense, other = Pair(self.q, self.k), Pair(q.view_as(self.q), k.view_as(self.k))
        return db(pair_error(dense, other, metrics=(self.C, self.C), rotations=self.rotations))

    def local(self, kind: str, rank: int) -> float:
        """Return the error of low ranks fitted to queries and keys each by itself."""
        metric = preconditioner(self.C, kind, ridge=RIDGE)
        fits = [low_rank(W.flatten(0, 1), metric, rank=rank) for W in (self.q, self.k)]
        return self.db(*(fit.B @ fit.A for fit in fits))

    def joint(self, kind: str, rank: int, *, rotations: Tensor | None = None) -> float:
        """Return the error of the joint form (Algorithm 1)."""
        metric = preconditioner(self.C, kind, ridge=RIDGE)
        fit = joint_qk(self.q, self.k, metric, ranks=(rank, rank), rotations=rotations)
        return self.db(fit.B_q @ fit.A_q, fit.B_k @ fit.A_k)


def random_scores(given: Problem, rotations: Tensor | None = None) -> Scores:
    q, k = (heads_of(normal(given.width, given.width), given.heads) for _ in "qk")
    return Scores(q, k, given.correlated, rotations)


def attention_aware(given: Problem) -> Iterator[Curve]:
    """Figure 10: fitted to the scores, against fitted to queries and keys."""
    scores, ranks = random_scores(given), [rank_of(share, given.width) for share in SHARES]
    for name, kind in {"identity": "identity", "l2": "l2", "root covariance": "rootcov"}.items():
        yield f"activation-aware, {name}", [(r / given.width, scores.local(kind, r)) for r in ranks]
        yield f"attention-aware, {name}", [(r / given.width, scores.joint(kind, r)) for r in ranks]


def sparse_scores(given: Problem) -> Iterator[Curve]:
    """Figure 11: sparse queries and keys, fitted to the scores, to their outputs, and by the diagonal."""
    scores, size = random_scores(given), given.W.numel()

    def low(share: float) -> tuple[float, float]:
        r = rank_storing(share, given.width, given.width)
        return r * (2 * given.width - r) / size, scores.joint("rootcov", r)

    def alone(share: float, method: str) -> tuple[Tensor, Tensor]:
        q, k = (
            sparse(W.flatten(0, 1), scores.C, count=int(share * size), method=method).D for W in (scores.q, scores.k)
        )
        return q.view_as(scores.q), k.view_as(scores.k)

    yield "attention-aware low rank", [low(share) for share in FEW]
    for name, method in {"diagonal (WandA) sparse": "diagonal", "activation-aware sparse": "hard"}.items():
        yield name, [(share, scores.db(*alone(share, method))) for share in FEW]
    yield (
        "attention-aware sparse",
        [(share, scores.db(*aware(scores, *alone(share, "hard"), int(share * size)))) for share in FEW],
    )


def aware(scores: Scores, q: Tensor, k: Tensor, count: int, rounds: int = 2) -> tuple[Tensor, Tensor]:
    """Return sparse queries and keys, each in turn fitted to the scores that it makes with the other."""
    C = scores.C
    for _ in range(rounds):
        q = side(scores.q, scores.k, k, C).hard(q, count)
        k = side(scores.k, scores.q, q, C).hard(k, count)
    return q, k


def side(W: Tensor, other: Tensor, sparse_other: Tensor, C: Tensor) -> TwoSided:
    """Return the loss of the scores as a function of sparse ``W``."""
    energy = ((W @ C @ W.mT) * (other @ C @ other.mT)).sum()
    crossed = sparse_other @ C @ other.mT
    return TwoSided(sparse_other @ C @ sparse_other.mT, C, crossed @ W @ C, energy)


def rotary(given: Problem) -> Iterator[Curve]:
    """Figure 12: the rotations of ten offsets in the fit, against none."""
    h = given.width // given.heads
    frequencies = ROPE_THETA ** (-torch.arange(0, h, 2, dtype=torch.float64) / h)
    rotations = rope_rotations(frequencies, h, window=ROPE_WINDOW - 1)
    scores, ranks = random_scores(given, rotations), [rank_of(share, given.width) for share in SHARES]
    yield "activation-aware", [(r / given.width, scores.local("rootcov", r)) for r in ranks]
    yield "attention-aware", [(r / given.width, scores.joint("rootcov", r)) for r in ranks]
    yield (
        "attention-aware, rotations",
        [(r / given.width, scores.joint("rootcov", r, rotations=rotations)) for r in ranks],
    )


def shrinkages(given: Problem) -> Iterator[Curve]:
    """Figure 13: how non-zeros are found, with and without correlated inputs."""
    for label, C in {"correlated": given.correlated, "uncorrelated": given.plain}.items():
        for name, method in {"hard": "hard", "soft": "soft", "straight-through": "ste"}.items():
            yield f"{name}, {label}", sparse_points(given, method, C)
        of_layer = TwoSided(
            torch.eye(given.width)[None].double(), C, (given.W @ C)[None], (given.W @ C * given.W).sum()
        )
        solutions = of_layer.fista()
        points = [((D != 0).double().mean().item(), db(metric_error(given.W - D[0], given.W, C))) for D in solutions]
        yield f"FISTA, {label}", [(x, y) for x, y in points if 0 < x <= max(FEW)]


def low_rank_and_sparse(given: Problem) -> Iterator[Curve]:
    """Figure 14: a low rank with a sparse correction, against either alone."""
    W, C, d = given.W, given.correlated, given.width
    yield from alone(given)
    for part in (12, 6):
        rank = d // part
        used = rank * (2 * d - rank)
        counts = [int(share * d * d) - used for share in FEW]
        fits = [low_rank_plus_sparse(W, C, rank=rank, count=count, rounds=2) for count in counts if count > 0]
        shares = [share for share, count in zip(FEW, counts, strict=True) if count > 0]
        yield f"rank width/{part} + sparse", [(x, db(fit.relative_error)) for x, fit in zip(shares, fits, strict=True)]


def sparse_points(given: Problem, method: str, C: Tensor) -> list[tuple[float, float]]:
    size = given.W.numel()
    return [(x, db(sparse(given.W, C, count=int(x * size), method=method).relative_error)) for x in FEW]


def alone(given: Problem) -> Iterator[Curve]:
    """Yield a low rank and a sparse matrix, each by itself, with correlated inputs."""
    W, C, d = given.W, given.correlated, given.width
    metric = preconditioner(C, "rootcov", ridge=RIDGE)
    ranks = [rank_storing(share, d, d) for share in FEW]
    yield "low rank", [(r * (2 * d - r) / d**2, db(low_rank(W, metric, rank=r, C=C).relative_error)) for r in ranks]
    yield "sparse", sparse_points(given, "hard", C)


def sparse_factors(given: Problem) -> Iterator[Curve]:
    """Figure 15: sparse factors, from ranks of 5/6 and 2/3 of the width."""
    W, C, d = given.W, given.correlated, given.width
    metric = preconditioner(C, "rootcov", ridge=RIDGE)
    yield from alone(given)
    for name, rank in {"sparse factors, rank 5/6": 5 * d // 6, "sparse factors, rank 2/3": 2 * d // 3}.items():
        fit = low_rank(W, metric, rank=rank)
        yield name, [(x, db(factored(W, C, fit.B, fit.A, int(x * d * d)))) for x in FEW]


def factored(W: Tensor, C: Tensor, B: Tensor, A: Tensor, count: int, rounds: int = 2) -> float:
    """Return the error of factors with ``count`` non-zeros together, half in each, fitted in turn."""
    energy, eye = (W @ C * W).sum(), torch.eye(len(W), dtype=W.dtype)[None]
    for _ in range(rounds):
        B = TwoSided(eye, A @ C @ A.T, (W @ C @ A.T)[None], energy).hard(B[None], count // 2)[0]
        A = TwoSided((B.T @ B)[None], C, (B.T @ W @ C)[None], energy).hard(A[None], count - count // 2)[0]
    return metric_error(W - B @ A, W, C)


def diagonal(given: Problem) -> Iterator[Curve]:
    """Figure 16: non-zeros chosen by the diagonal alone, as WandA does, against the whole moment."""
    for label, C in {"correlated": given.correlated, "uncorrelated": given.plain}.items():
        yield f"diagonal (WandA), {label}", sparse_points(given, "diagonal", C)
        yield f"hard, {label}", sparse_points(given, "hard", C)


FIGURES = {
    7: preconditioners,
    8: joint_qkv,
    9: split_heads,
    10: attention_aware,
    11: sparse_scores,
    12: rotary,
    13: shrinkages,
    14: low_rank_and_sparse,
    15: sparse_factors,
    16: diagonal,
}

if __name__ == "__main__":
    main()
