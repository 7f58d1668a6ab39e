"""The picture, the table and the example of the README, and the longer table of docs/results/index.md, by records."""

import io
import re
from pathlib import Path

from rankfold._utils.files import read_json, write_text
from rankfold.cli.summary import removed, side_by_side
from rankfold.errors import CheckpointError

from .models import PAPER
from .perplexity import FORMS
from .summaries import QUESTIONS
from .tables import named, percent, windows

HEAD = "| sparsity 0.3, 2 CPU cores | dense | `rankfold` | `modegpt` | module forms | as published | `latentllm` |"
SHORT_HEAD = "| sparsity 0.3, 2 CPU cores | dense | `rankfold` | `modegpt` | `latentllm` |"
SHORT = (0, 1, 2, 3, 6)  # of the columns above
PICTURE = "front.png"
DRAWN = {"rankfold": "#3f51b5", "modegpt": "#00897b", "slicegpt": "#8d6e63", "shortgpt": "#9e9e9e"}  # setting -> colour
DENSE = "dense"
SETTINGS = ("rankfold", "modegpt", FORMS, "MoDeGPT as published", "latentllm (joint)")  # columns
# Record -> what its file is: the name of a model hides that weights have few bits and that it was tuned for chat.
MODELS = {
    "perplexity_smollm2": "SmolLM2-135M-Instruct (Q4_1)",
    "perplexity_qwen2.5": "Qwen2.5-Coder-0.5B-Instruct-AWQ (Q4_K_M)",
    "perplexity_gemma3": "Gemma 3 270M (Q4_K_M)",
}
NONE = "–"
C4 = "c4_demo.jsonl"
GRID = {  # rows of the grid -> their names elsewhere
    "latentllm 0.3": "latentllm (joint) 0.3",
    f"{PAPER} 0.3": f"{FORMS} 0.3",
}
LIST = "## All pages"  # the rest of the first page


def render(results: Path, readme: Path, index: Path) -> None:
    """Replace what comes out of records in the README and on the first pages of the site and of its results.

    Raises:
        CheckpointError: one of them has no table of this head, or no example, or more than one.
    """
    for path, lines in ((readme, short(results)), (index, table(results))):
        replace(path, rf"^{re.escape(lines[0])}\n(\|.*\n)+", lines)
    for path in (readme, index.parents[1] / index.name):
        replace(path, r"^```text\nsmall: (.*\n)+?```\n", example(results))
    write_text(
        index, index.read_text(encoding="utf-8").partition(LIST)[0] + "\n".join([LIST, "", *listed(index.parent)])
    )
    (index.parent / PICTURE).write_bytes(picture(rows(results, "tradeoff_smollm2")))


def listed(folder: Path) -> list[str]:
    """Return the list of the pages in a folder, by part, each with its question."""
    titles = {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in folder.glob("*.md")
    }
    lines: list[str] = []
    for part, pages in QUESTIONS.items():
        here = [f"- [{titles[page]}]({page}.md): {question}" for page, (question, _) in pages.items() if page in titles]
        lines += [f"### {part}", "", *here, ""] if here else []
    return lines


def replace(path: Path, there: str, lines: list[str]) -> None:
    """Replace the one place in a file that matches a pattern."""
    text, count = re.subn(there, lambda _: "\n".join(lines) + "\n", path.read_text(encoding="utf-8"), flags=re.M)
    if count != 1:
        raise CheckpointError(f"{path.name} has {count} places that match {there!r}; one is wanted")
    write_text(path, text)


def example(results: Path) -> list[str]:
    """Return the summary of the first run, as the command prints it."""
    return summary_of(next(iter(rows(results, "first_run").values())))


def summary_of(run: dict) -> list[str]:
    """Return the lines of a block of text: what was compressed, sizes, perplexities."""
    head = f"small: {run['base_model']} by {run['method']}, {removed(run['counts'])}"
    return ["```text", head, *side_by_side(run), "```"]


def first_run(record: dict) -> list[str]:
    """Return the lines of its page."""
    config, (run,) = record["config"], record["rows"]
    calibration = config["calibration"]
    counted = {"samples": calibration["num_samples"], "length": calibration["max_length"]}
    return [f"Calibrated on {windows(counted)} of {calibration['source']}.", "", *summary_of(run), ""]


def picture(found: dict[str, dict]) -> bytes:
    """Draw perplexity and prefill speed against sparsity as PNG."""
    from matplotlib.figure import Figure  # the extra rankfold[report]

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for setting, colour in DRAWN.items():
        at, perplexities, speeds = curve(found, setting)
        left.plot(at, perplexities, "o-", color=colour, label=setting)
        right.plot(at, speeds, "o-", color=colour, label=setting)
    left.set(yscale="log", ylabel="perplexity (log scale)", title="Perplexity on WikiText-2")
    left.set_yticks(ticks := [25, 50, 100, 200, 500], map(str, ticks), minor=False)
    left.minorticks_off()
    right.set(ylabel="speed over the dense model", title="Prefill speed, 2 CPU cores")
    for axes in (left, right):
        axes.set(xlabel="sparsity", xticks=at)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    found_bytes = io.BytesIO()
    figure.savefig(found_bytes, format="png", dpi=160, metadata={"Software": None})
    return found_bytes.getvalue()


def curve(found: dict[str, dict], setting: str) -> tuple[list[float], list[float], list[float]]:
    """Return sparsities, perplexities and prefill speeds over the dense model's, from the dense model on."""
    chosen = sorted((row["sparsity"], row) for row in found.values() if row["setting"] in (DENSE, setting))
    of = [row for _, row in chosen]
    perplexities = [next(iter(row["perplexity"].values())) for row in of]
    return [s for s, _ in chosen], perplexities, [row["speed"]["prefill_ratio"] for row in of]


def short(results: Path) -> list[str]:
    """Return the table of the README: six rows of the longer one, for the three methods to use."""
    lines = [line.strip("| ").split(" | ") for line in table(results)]
    wanted = ("parameters", "perplexity of ", "zero-shot")
    chosen = [[line[i] for i in SHORT] for line in lines[2:] if line[0].startswith(wanted)]
    return [SHORT_HEAD, "|---" * len(SHORT) + "|", *(joined(*line) for line in chosen)]


def table(results: Path) -> list[str]:
    """Return its lines; a record that is missing, or the row of a dense model, ends in an error."""
    smol = rows(results, "perplexity_smollm2")
    return [
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
        line("parameters of SmolLM2", smol, lambda row: f"{row['parameters'] / 1e6:.1f} M"),
        *(text for name in MODELS for text in perplexities(results, name)),
        line(
            f"zero-shot accuracy of {MODELS['perplexity_smollm2']}, mean of four tasks (± 1.5)",
            rows(results, "zero_shot_smollm2"),
            accuracy,
        ),
        *caches(results),
        *speed(rows(results, "speed"), rows(results, "decode")),
        cost(rows(results, "compression_cost")),
    ]


def rows(results: Path, name: str) -> dict[str, dict]:
    return named(read_json(results / f"{name}.json"))


def line(what: str, found: dict[str, dict], cell) -> str:
    """One row: ``cell`` of the dense model's row and of that of every setting that was measured."""
    names = [f"{setting} 0.3" for setting in SETTINGS]
    return joined(what, cell(found[DENSE]), *(cell(found[name]) if name in found else NONE for name in names))


def joined(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def perplexities(results: Path, name: str) -> list[str]:
    """Rows that say which file was measured, and on how long an excerpt; of SmolLM2 on C4, too."""
    text = read_json(results / f"{name}.json")["config"]["evaluation"]
    what = f"perplexity of {MODELS[name]} on {text['samples']} x {text['length']} tokens of"
    found = [line(f"{what} WikiText-2", rows(results, name), lambda row: number(row["perplexity"]))]
    if name == "perplexity_smollm2":
        grid = read_json(results / "grid_smollm2.json")["config"]["evaluation"][C4]
        what = f"perplexity of {MODELS[name]} on {grid['samples']} x {grid['length']} tokens of C4"
        other = {GRID.get(key, key): row for key, row in rows(results, "grid_smollm2").items()}
        found.append(line(what, other, lambda row: number(row["perplexity"][C4])))
    return found


def number(value: float) -> str:
    return f"{value:.1f}" if value < 200 else f"{value:.0f}"


def accuracy(row: dict) -> str:
    return percent(row["mean"])


def caches(results: Path) -> list[str]:
    """Rows of the cache; one that no setting was measured for is left out."""
    smol, opt = (rows(results, name) for name in ("kv_cache_smollm2", "kv_cache_opt-6m"))
    counted = {DENSE: smol[DENSE], "rankfold 0.3": smol["rankfold, the cache counted 0.3"]}
    found = {
        "SmolLM2, bf16": _named(smol),
        "SmolLM2, the cache in the budget (`--budget bytes:batch=4`)": counted,
        "opt-6m, bf16": _named(opt),
    }
    measured = {what: part for what, part in found.items() if any(f"{setting} 0.3" in part for setting in SETTINGS)}
    return [
        line(f"KV-cache bytes per token of {what}", part, lambda row: f"{row['kv_bytes_per_token']:,}")
        for what, part in measured.items()
    ]


def _named(found: dict[str, dict]) -> dict[str, dict]:
    """Rows by the names of the columns: the record of the cache calls `latentllm (joint)` by the method alone."""
    return {name.replace("latentllm 0", "latentllm (joint) 0"): row for name, row in found.items()}


def speed(of: dict[str, dict], decode: dict[str, dict]) -> list[str]:
    """Every shape and precision that was measured: the least and the most."""
    prefill: dict[str, list[float]] = {}
    for row in of.values():
        prefill.setdefault(row["dtype"], []).append(row["models"]["compressed"]["ratio"])
    decoding: dict[str, list[float]] = {}
    for row in decode.values():
        decoding.setdefault(row["dtype"], []).append(row["found"]["compressed"]["ratio"])
    gaps = [NONE] * (len(SETTINGS) - 1)
    return [
        joined("prefill and blocks alone, three shapes, fp32 (bf16)", "× 1", of_both(prefill), *gaps),
        joined("decode, two shapes, 1 and 8 sequences, fp32 (bf16)", "× 1", of_both(decoding), *gaps),
    ]


def of_both(ratios: dict[str, list[float]]) -> str:
    return f"{spread(ratios['float32'])} ({spread(ratios['bfloat16'])})"


def spread(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"× {low}" if low == high else f"× {low} to {high}"


def cost(of: dict[str, dict]) -> str:
    ratios = of["autocast"]["ratios"]
    default, sequential, one_pass = (f"{ratios[kind]['ratio']:.1f}" for kind in ("default", "sequential", "one-pass"))
    what = "cost of compressing, in plain forwards over 32 x 1024 calibration tokens"
    return joined(what, NONE, default, f"{sequential}; in one pass {one_pass}", *[NONE] * (len(SETTINGS) - 2))
