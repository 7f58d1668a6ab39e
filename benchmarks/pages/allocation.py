"""The page of sparsity by block: MoDeGPT's Tables 22 and 27, and its Figures 6, 8 and 9 as pictures."""

import statistics
from pathlib import Path

from .curves import picture
from .tables import compressed, dense_of, number, table, texts

HEAD = ["", "mean over blocks", "deviation", "least", "largest", "perplexity"]


def allocation(record: dict, folder: Path | None) -> list[str]:
    """Return the table of allocations with its pictures, written into the folder, and of slicing after MoDeGPT."""
    rows = [row for row in compressed(record) if row["study"] == "allocation"]
    done = [row for row in rows if "error" not in row]
    model = Path(record["config"]["model"]["name"]).stem
    blocks = {row["setting"]: [(i, 100 * s) for i, s in enumerate(row["blocks"])] for row in done}
    scores = {row["setting"]: _by_score(row) for row in done if row["scores"] and "Eq. 43" not in row["setting"]}
    lines = [*texts(record), f"- dense: {number(dense_of(record)['perplexity'])}", ""]
    lines += ["### Allocations at sparsity 0.3 (MoDeGPT, Table 27)", "", *table(HEAD, map(_row, rows)), ""]
    title = "Sparsity by block (MoDeGPT, Figures 8 and 9)"
    lines += picture(folder, f"{model}-sparsity-by-block.png", title, blocks, x="block", y="sparsity (%)")
    title, over = "Score to sparsity (MoDeGPT, Figure 6)", "score of a block over the largest score"
    lines += picture(folder, f"{model}-sparsity-by-score.png", title, scores, x=over, y="sparsity (%)")
    sliced = [row for row in compressed(record) if row["study"] == "slices"]
    if sliced:
        head = ["slice-MLP-attention, %", "removed", "perplexity"]
        body = [[row["setting"], *_reached(row)] for row in sliced]
        lines += ["### SliceGPT and MoDeGPT together (Table 22)", "", *table(head, body), ""]
    return lines


def _row(row: dict) -> list[str]:
    if "error" in row:
        return [row["setting"], *[""] * 4, row["error"]]
    blocks = row["blocks"]
    found = (statistics.mean(blocks), statistics.pstdev(blocks), min(blocks), max(blocks))
    return [row["setting"], *(f"{value:.1%}" for value in found), number(row["perplexity"])]


def _reached(row: dict) -> list[str]:
    return ["", row["error"]] if "error" in row else [f"{row['removed']:.1%}", number(row["perplexity"])]


def _by_score(row: dict) -> list[tuple[float, float]]:
    """Return scores with sparsities, from the least important block to the most."""
    scores = [score[0] if isinstance(score, list) else score for score in row["scores"]]
    points = sorted(zip(scores, row["blocks"], strict=True))
    return [(score / points[-1][0], 100 * sparsity) for score, sparsity in points]
