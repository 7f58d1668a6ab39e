"""The page of what training gives back: a table a study, and the curve of tokens against perplexity."""

from pathlib import Path
from typing import Any

from .models import written
from .tables import compressed, dense_of, number, table, texts

STUDIES = {
    "tokens": "Tokens (all weights, and adapters)",
    "sparsity": "What is trained, by sparsity (MoDeGPT, Table 20)",
    "methods": "Methods in equal time (MoDeGPT, Table 21)",
    "tune": "What is trained",
    "texts": "Trained on what",
    "loss": "Towards what",
    "lr": "Learning rate",
    "rank": "Rank of adapters",
}


def recover(record: dict, folder: Path | None) -> list[str]:
    """Return a table of every study, and the picture, written into the folder."""
    rows, names = compressed(record), list(record["config"]["evaluation"])
    how, asked = record["config"]["recover"], ["zero-shot mean"] if "tasks" in record["config"] else []
    trained_on = how["text"] if isinstance(how["text"], str) else " + ".join(how["text"])
    lines = [
        *texts(record),
        f"- trained on `{trained_on}`: sequences of {how['max_length']} tokens, {how['batch_tokens']} tokens a step, "
        f"{how['tokens']:,} tokens where a row says nothing else",
        f"- dense: {', '.join(_cells(dense_of(record)))}",
        "",
    ]
    if any(row["study"] == "tokens" for row in rows):
        file = f"{record['config']['model']['name']}-recover-tokens.png"
        if folder:
            (folder / file).write_bytes(_picture(record))
        lines += [f"![Perplexity over the dense model's, by tokens trained on]({file})", ""]
    for study, title in STUDIES.items():
        mine = sorted((row for row in rows if row["study"] == study), key=lambda row: row["sparsity"])
        if mine:
            head = ["", "", "tokens seen", "seconds", *names, *asked]
            lines += [f"### {title}", "", *table(head, map(_row, mine), tight=True), ""]
    return lines + (written(record) if "prompts" in record["config"] else [])


def _row(row: dict) -> list[str]:
    done = row.get("recovery")
    seconds = done["seconds"] if done else None  # none where the run was stopped for a while
    trained = [f"{done['tokens_seen']:,}" if done else "", f"{seconds:.0f}" if seconds else ""]
    if "error" in row:
        return [row["setting"], row["value"], *trained, row["error"]]
    given_back = done is not None and not done["recovered"]
    return [row["setting"], row["value"] + (", given back" if given_back else ""), *trained, *_cells(row)]


def _cells(row: dict) -> list[str]:
    """Return perplexities, then accuracy where tasks were asked."""
    return [*map(number, row["perplexity"].values()), *([f"{row['mean']:.3f}"] if "mean" in row else [])]


def curves(record: dict) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return setting -> text -> tokens seen with perplexity over the dense model's, from 0 tokens on."""
    dense, found = dense_of(record)["perplexity"], {}
    rows = [row for row in compressed(record) if row["study"] == "tokens"]
    start = [row for row in compressed(record) if "recovery" not in row and row["sparsity"] == rows[0]["sparsity"]]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [(0, one) for one in start[:1]]
        mine += sorted(
            ((row["recovery"]["tokens_seen"], row) for row in rows if row["setting"] == setting),
            key=lambda pair: pair[0],
        )
        found[setting] = {
            text: [(tokens, row["perplexity"][text] / dense[text]) for tokens, row in mine] for text in dense
        }
    return found


def _picture(record: dict) -> bytes:
    """Draw the curves as PNG; tokens by their root, so that the first thousands have room."""
    from rankfold.comparison.report.plots import Picture, drawn, legend, panel, style  # the extra rankfold[report]

    def draw() -> Any:
        figure, axes = panel("perplexity over the dense model's")
        places = [(setting, text, points) for setting, by in curves(record).items() for text, points in by.items()]
        for index, (setting, text, points) in enumerate(places):
            if len(points) > 1:
                at, ratios = zip(*points, strict=True)
                axes.plot(at, ratios, label=f"{text}, {setting}", **style(index))
        axes.set_xscale("function", functions=(lambda x: abs(x) ** 0.5, lambda x: x**2))
        ticks = sorted({tokens for *_, points in places for tokens, _ in points})
        axes.set_xticks(ticks, [f"{round(tokens / 1000)} k" if tokens else "0" for tokens in ticks])
        axes.axhline(1, color="0.5", linestyle=":", linewidth=1.2, label="dense")
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel("ratio")
        return legend(figure, axes)

    return drawn(Picture("recover-tokens", "Perplexity by tokens trained on", "results", draw)).png
