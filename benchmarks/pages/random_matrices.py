"""The page of studies on random matrices: every figure with what the paper says of it and what came out here."""

import bisect
from pathlib import Path
from typing import NamedTuple

from .tables import table

PICTURE = "random_matrices-{}.png"
X_LABELS = {7: "rank / width", 10: "rank / width", 12: "rank / width"}


class Study(NamedTuple):
    """One figure of LatentLLM."""

    title: str
    claim: str
    verdict: str  # with {gaps}
    gaps: tuple[tuple[str, str, float], ...]  # curve, curve, x: by how many decibels the second is better there


STUDIES = {
    7: Study(
        "Pre-conditioners",
        "the root covariance is best, and the covariance worse than its root",
        "Holds: the root is {} dB better than plain SVD and {} dB than the covariance.",
        (("SVD", "root covariance", 0.5), ("covariance", "root covariance", 0.5)),
    ),
    8: Study(
        "One latent for queries, keys and values",
        "one latent leaves more rank at equal numbers, and a smaller error",
        "Holds: {} dB with plain factors and {} dB with identity blocks at 0.4 of the numbers; with those the gain is "
        "{} dB at 0.9.",
        (
            ("split", "joint", 0.4),
            ("split, identity block", "joint, identity block", 0.4),
            ("split, identity block", "joint, identity block", 0.9),
        ),
    ),
    9: Study(
        "A low rank for every head",
        "terrible",
        "Holds: {} dB worse than one low rank for all heads.",
        (("split heads", "joint heads", 0.5),),
    ),
    10: Study(
        "Fitted to the scores",
        "fitting the scores beats fitting queries and keys",
        "Holds: {} dB with the root covariance; with the identity the joint form gains {} dB.",
        (
            ("activation-aware, root covariance", "attention-aware, root covariance", 0.5),
            ("activation-aware, identity", "attention-aware, identity", 0.5),
        ),
    ),
    11: Study(
        "Sparse queries and keys",
        "sparse is better than low rank, and attention-aware better than activation-aware",
        "Holds, without counting indices: sparse beats low rank by {} dB, and aware of attention by {} dB.",
        (
            ("attention-aware low rank", "attention-aware sparse", 0.5),
            ("activation-aware sparse", "attention-aware sparse", 0.5),
        ),
    ),
    12: Study(
        "Rotary embedding",
        "without the rotations already good; with them 1 to 2 dB better",
        "Holds for the gain, {} dB. Without the rotations the joint form is only {} dB better than fitting queries and "
        "keys apart.",
        (("attention-aware", "attention-aware, rotations", 0.5), ("activation-aware", "attention-aware", 0.5)),
    ),
    13: Study(
        "How non-zeros are found",
        "hard shrinkage works best",
        "Holds in part, with correlated inputs: hard beats FISTA by {} dB at a density of 0.5, straight-through beats "
        "hard by {} dB at 0.1 and by {} dB at 0.5. Without correlation hard, "
        "soft and straight-through agree and FISTA is {} dB worse.",
        (
            ("FISTA, correlated", "hard, correlated", 0.5),
            ("hard, correlated", "straight-through, correlated", 0.1),
            ("hard, correlated", "straight-through, correlated", 0.5),
            ("FISTA, uncorrelated", "hard, uncorrelated", 0.5),
        ),
    ),
    14: Study(
        "Low rank plus sparse",
        "no better than sparse alone",
        "Holds: sparse alone is {} dB better than a rank of a twelfth of the width plus sparse, and that {} dB better "
        "than a low rank alone. Indices are not counted ([with them it turns "
        "round](../papers.md#what-was-learned-on-the-way)).",
        (("rank width/12 + sparse", "sparse", 0.5), ("low rank", "rank width/12 + sparse", 0.5)),
    ),
    15: Study(
        "Sparse factors",
        "better than a low rank, no better than sparse alone",
        "Holds in the middle: at a density of 0.5 {} dB better than a low rank and {} dB worse than sparse alone. At "
        "0.1 they are {} dB better than sparse alone, at 0.9 {} dB worse than a low rank.",
        (
            ("low rank", "sparse factors, rank 2/3", 0.5),
            ("sparse factors, rank 2/3", "sparse", 0.5),
            ("sparse", "sparse factors, rank 2/3", 0.1),
            ("sparse factors, rank 2/3", "low rank", 0.9),
        ),
    ),
    16: Study(
        "Non-zeros by the diagonal alone",
        "the diagonal approximation is worse",
        "Holds: {} dB worse with correlated inputs, {} dB without correlation.",
        (
            ("diagonal (WandA), correlated", "hard, correlated", 0.5),
            ("diagonal (WandA), uncorrelated", "hard, uncorrelated", 0.5),
        ),
    ),
}


def random_matrices(record: dict, folder: Path | None) -> list[str]:
    """Return pictures, written into the folder, and one line of each figure."""
    config, figures = record["config"], {}
    for row in record["rows"]:
        figures.setdefault(row["figure"], []).append(row)
    lines = [f"Weights of {config['width']} x {config['width']}, {config['heads']} heads, seed {config['seed']}.", ""]
    body = [[str(n), STUDIES[n].claim, verdict(STUDIES[n], rows)] for n, rows in sorted(figures.items())]
    lines += [*table(["figure", "the paper", "here"], body), ""]
    for n, rows in sorted(figures.items()):
        name = PICTURE.format(n)
        if folder:
            (folder / name).write_bytes(drawn(n, rows))
        lines += [f"### Figure {n}: {STUDIES[n].title.lower()}", "", f"![{STUDIES[n].title}]({name})", ""]
    return lines


def verdict(study: Study, rows: list[dict]) -> str:
    """Return what came out, with its numbers."""
    curves = {row["curve"]: row for row in rows}
    gaps = [at(curves[worse], x) - at(curves[better], x) for worse, better, x in study.gaps]
    return study.verdict.format(*(f"{round(gap, 1) + 0.0:.1f}" for gap in gaps))


def at(row: dict, x: float) -> float:
    """Return a curve at ``x``, between its points by a line."""
    points = sorted(zip(row["x"], row["y"], strict=True))
    right = min(max(1, bisect.bisect_left(points, (x,))), len(points) - 1)
    (a, low), (b, high) = points[right - 1 : right + 1]
    return low + (high - low) * (x - a) / (b - a)


def drawn(figure: int, rows: list[dict]) -> bytes:
    """Return the picture of one figure as PNG."""
    from rankfold.comparison.report.plots import Picture, drawn, legend, panel, style  # the extra rankfold[report]

    def draw():
        paper, axes = panel(f"Figure {figure}: {STUDIES[figure].title.lower()}")
        for index, row in enumerate(rows):
            axes.plot(row["x"], row["y"], label=row["curve"], **style(index))
        axes.set_xlabel(X_LABELS.get(figure, "numbers stored / numbers of the dense weights"))
        axes.set_ylabel("squared error (dB)")
        return legend(paper, axes)

    return drawn(Picture(f"random_matrices-{figure}", STUDIES[figure].title, "results", draw)).png
