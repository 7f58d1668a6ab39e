"""Pages of what compressed models can do: accuracy, pictures and text, what they write, speed, targets."""

import math
import textwrap
from itertools import pairwise
from pathlib import Path

from .curves import by_sparsity as by_sparsity_of
from .curves import picture
from .tables import by_sparsity, compressed, crossed, dense_of, number, score, setting, table, texts, windows


def zero_shot(record: dict) -> list[str]:
    config, names = record["config"], list(record["config"]["tasks"])
    body = []
    for row in sorted(record["rows"], key=lambda row: row["sparsity"]):
        values = [(row["tasks"][name]["acc"], row["tasks"][name]["acc_stderr"]) for name in names]
        shares = [f"{value:.3f} ± {error:.3f}" for value, error in [*values, (row["mean"], row["mean_stderr"])]]
        body.append([setting(row), f"{row['sparsity']:.0%}", *shares])
    text = config["calibration"]
    return [
        f"- calibration: {windows(text)} of `{text['source']}`",
        *(f"- {task}: the first {config['limit']} rows of `{file}`" for task, file in config["tasks"].items()),
        f"- lm-eval {config['lm_eval']}, no examples before a question",
        "",
        *table(["", "sparsity", *names, "mean"], body),
    ]


def samples(record: dict) -> list[str]:
    """Return prompt by prompt what every model writes."""
    config = record["config"]
    text = config["calibration"]
    lines = [
        f"Sparsity {config['sparsity']} and {windows(text)} of `{text['source']}` where a name gives nothing else.",
        "",
    ]
    return lines + written(record)


def written(record: dict) -> list[str]:
    """Return what every model of a record writes after each of its prompts."""
    config, lines = record["config"], []
    titles = [*(f"Continue: {prompt}" for prompt in config["prompts"]), *(f"Asked: {q}" for q in config["questions"])]
    for index, title in enumerate(titles):
        lines += [f"### {title}", ""]
        for row in record["rows"]:
            lines += [f"{row['name']}:", "", "~~~text", *_wrapped(row["texts"][index]), "~~~", ""]
    return lines


def _wrapped(text: str) -> list[str]:
    """Return lines of the page; its own lines stay, and none of them can end the block."""
    lines = text.strip().replace("~~~", "~ ~ ~").splitlines()
    return [part for line in lines for part in textwrap.wrap(line, 110) or [""]] or ["(nothing)"]


KINDS = ("prefill", "decode")
PAPER = "modegpt:selection=leverage,selection_qk=norm,gqa=paper"
SHORT = {PAPER: "modegpt, paper's module forms"}  # in picture and table


def tradeoff(record: dict, folder: Path | None) -> list[str]:
    """Return pictures, written into the folder, and their numbers."""
    from rankfold.comparison.report.page import pictures  # the extra rankfold[report]
    from rankfold.comparison.report.plots import drawn

    done = [
        row | {"setting": SHORT.get(row["setting"], row["setting"])} for row in record["rows"] if "error" not in row
    ]
    dense, *others = sorted(done, key=lambda row: row["setting"] != "dense")
    how = record["config"]["speed"]
    about = f"{how['batch']} x {how['prompt']} tokens, then {how['steps']} steps; {how['repeats']} rounds"
    lines = [*texts(record), f"- speed: {about}", ""]
    lines += ["A point of a curve is a sparsity; from the smallest on, as in the table.", ""]
    for one in pictures([_as_compared(row) for row in (dense, *others)]):
        if one.name.startswith("speed-"):
            file = f"{_stem(record)}-{one.name}.png"
            if folder:
                (folder / file).write_bytes(drawn(one).png)
            lines += [f"![{one.title}]({file})", ""]
    for kind in KINDS:
        curves = by_sparsity_of(others, value=lambda row: row["speed"][f"{kind}_ratio"])  # noqa: B023
        file, title = f"{_stem(record)}-speedup-{kind}.png", f"{kind.capitalize()} speed (MoDeGPT, Figure 12)"
        lines += picture(folder, file, title, curves, x="sparsity (%)", y="speed over the dense model's")
    speeds = " and ".join(f"{dense['speed'][f'{kind}_tokens_per_second']:,.0f} in {kind}" for kind in KINDS)

    def perplexities(row: dict) -> str:
        return ", ".join(map(number, row["perplexity"].values()))

    def cell(row: dict) -> str:
        ratios = [f"{row['speed'][f'{kind}_ratio']:.2f}" for kind in KINDS]
        return f"{perplexities(row)}; {', '.join(ratios)}"

    told = "Perplexity; speed over the dense model's in prefill, in decode."
    return [*lines, f"{told} Dense: {perplexities(dense)}; {speeds}, tokens/s.", "", *by_sparsity(others, cell), ""]


def _stem(record: dict) -> str:
    return Path(record["config"]["model"]["name"]).stem


def _as_compared(row: dict) -> dict:
    """Return a row as the report of a comparison takes it."""
    found = [{"text": Path(text).stem, "perplexity": value} for text, value in row["perplexity"].items()]
    return {
        "label": row["setting"],
        "status": "done",
        "sparsity": row["sparsity"],
        "counts": {"sparsity": row["removed"]},
        "modules": [],
        "measures": {"texts": found, "speed": row["speed"]},
    }


def targets(record: dict) -> list[str]:
    forms = ("stock", "deci")

    def line(row: dict) -> list[str]:
        if "refused" in row or "error" in row:
            return [row["setting"], f"{row['sparsity']:.0%}", "", "does not exist", "", "", ""]
        counts = [row.get("parameters"), *(row.get(form) for form in forms)]
        removed = f"{row['removed']:.2%}" if row.get("removed") else ""
        shown = ["" if count is None else f"{count / 1e6:.2f} M" for count in counts]
        return [setting(row), f"{row['sparsity']:.0%}", removed, score(row), *shown]

    head = ["", "sparsity", "removed", "perplexity", "parameters", *forms]
    return table(head, map(line, sorted(record["rows"], key=lambda row: row["sparsity"])))


def kv_cache(record: dict) -> list[str]:
    """Return every row with its cache; the one that counts it last."""
    dense = dense_of(record)
    order = ("rankfold", "modegpt", "latentllm")
    rows = sorted(compressed(record), key=lambda r: order.index(r["setting"]) if r["setting"] in order else len(order))
    head = ["", "sparsity", "perplexity", "KV-cache bytes per token", "MB of the blocks"]
    head += [f"MB of a cache of {dense['cache_bytes'] // dense['kv_bytes_per_token']:,} tokens", "MB together"]
    body = []
    for row in (dense, *rows):
        together, whole = (r["weight_bytes"] + r["cache_bytes"] for r in (row, dense))
        body.append(
            [
                *(row["setting"], f"{row['sparsity']:.0%}", number(row["perplexity"])),
                _beside(row["kv_bytes_per_token"], dense["kv_bytes_per_token"], f"{row['kv_bytes_per_token']:,}"),
                *(f"{row[name] / 1e6:.1f}" for name in ("weight_bytes", "cache_bytes")),
                _beside(together, whole, f"{together / 1e6:.1f}"),
            ]
        )
    return [*texts(record), "", *table(head, body)]


def _beside(value: int, dense: int, shown: str) -> str:
    return shown if value == dense else f"{shown} ({value / dense - 1:+.1%})".replace("-", "−")


def encoders(record: dict) -> list[str]:
    metrics = [name for name in record["definitions"] if name not in ("parameters", "compress_seconds")]
    config = record["config"]
    fitted = config["calibration"]
    images = fitted.get("kind") == "images"
    what = "images" if images else f"windows of {fitted['length']} tokens of `{fitted['source']}`"
    asked = f"{config['sentences']} sentences" if "sentences" in config else f"{config['test_images']} images"
    body = [
        [
            *(row.get("method", "dense"), f"{row.get('sparsity', 0.0)}", f"{row['parameters'] / 1e6:.2f} M"),
            *(f"{row[name]:.3f}" for name in metrics),
        ]
        for row in sorted(record["rows"], key=lambda row: (row.get("method", ""), row.get("sparsity", 0.0)))
    ]
    lines = [f"Calibrated on {fitted['samples']} {what}; asked for {asked}.", ""]
    return lines + table(["", "sparsity", "parameters", *metrics], body, tight=True)


# The order of LatentLLM's Table 4, worst first.
ORDER = (("identity",), ("hessian", "l2"), ("covariance",), ("rootcov",), ("latentllm (joint)",))


SPOKES = ("identity", "covariance", "rootcov", "latentllm (joint)", "modegpt", "rankfold")
AT = (0.3, 0.5)  # at 0.1 all are alike


def images_and_text(record: dict, folder: Path | None = None) -> list[str]:
    """Return one table a component, each step of the paper's order in words, and the radars of its Figure 6."""
    config, dense = record["config"], dense_of(record)
    asked = ", ".join(f"{n} of {kind}" for kind, n in config["questions"].items())
    fitted = " or ".join(
        f"{some['samples']} examples ({some['tokens']} tokens) of `{some['source']}`"
        for some in config["calibration"].values()
    )
    lines = [
        f"{dense['parameters'] / 1e3:.0f} thousand parameters, calibrated on {fitted}. Asked: {asked};",
        "`text` is about a description in the place of a picture. Accuracy in percent, ± one standard error.",
        "",
    ]
    cases = dict.fromkeys(row["case"] for row in compressed(record))
    rows = {case: [row for row in compressed(record) if row["case"] == case] for case in cases}
    for case, mine in rows.items():
        means = by_sparsity(mine, _share, head="mean of all kinds", tight=True)
        means.insert(2, f"| dense: {_share(dense)} |" + " |" * (means[0].count("|") - 2))
        found = {(row["setting"], row["sparsity"]): row for row in mine}
        lines += [f"### Compressed: {case}", "", *means, ""]
        lines += ["The paper's order, worse first, in points of the mean that the second gains:", ""]
        lines += [_gain(found, a, b) for worse, better in pairwise(ORDER) for a in worse for b in better] + [""]
    lines += ["### Language model alone, by kind of question (LatentLLM, Figure 6)", ""]
    lines += _radars("images_and_text", dense, [row for row in rows["language"] if row["setting"] in SPOKES], folder)
    for case, mine in rows.items():
        lines += [f"### By kind of question: {case}", "", *_by_kind(mine, dense, config["chance"]), ""]
    return lines


def _radars(page: str, dense: dict, rows: list[dict], folder: Path | None) -> list[str]:
    """Return the lines of the pictures of accuracy by kind at two of the three sparsities of the paper's Figure 6."""
    from rankfold.comparison.report.page import pictures  # the extra rankfold[report]
    from rankfold.comparison.report.plots import drawn

    lines, shown = [], [row for row in rows if row["sparsity"] in AT and "error" not in row]
    found = pictures([_as_asked(row) for row in (dense, *shown)])
    for one in (one for one in found if one.name.startswith("tasks-")):
        file = f"{page}-{one.name}.png"
        if folder:
            (folder / file).write_bytes(drawn(one).png)
        lines += [f"![{one.title}]({file})", ""]
    return lines


def _as_asked(row: dict) -> dict:
    """Return a row as the report of a comparison takes it, with questions for tasks and the mean's loss for order."""
    tasks = {kind: {"acc": share} for kind, share in row["accuracy"].items()}
    counts = {"sparsity": row["sparsity"]}
    measures = {"texts": [{"text": "", "perplexity": 2 - row["mean"]}], "tasks": tasks}
    facts = {"label": setting(row), "sparsity": row["sparsity"], "counts": counts, "measures": measures}
    return facts | {"status": "done", "modules": []}


def _by_kind(rows: list[dict], dense: dict, chance: dict) -> list[str]:
    """Return the shape of the paper's Table 4."""
    mean = sum(chance.values()) / len(chance)
    guessed = ["the most frequent answer", "", *(f"{100 * share:.1f}" for share in (*chance.values(), mean))]
    return _table_4([guessed], [dense, *sorted(rows, key=lambda row: row["sparsity"])])


def _table_4(first: list[list[str]], rows: list[dict]) -> list[str]:
    kinds = list(rows[0]["accuracy"])
    body = [*first]
    for row in rows:
        cells = [row["error"], *[""] * len(kinds)] if "error" in row else [*(_kind(row, k) for k in kinds), _share(row)]
        body.append([setting(row), f"{row['sparsity']:.0%}", *cells])
    return table(["", "sparsity", *kinds, "mean"], body, tight=True)


def _kind(row: dict, kind: str) -> str:
    return f"{100 * row['accuracy'][kind]:.1f} ± {100 * row['stderr'][kind]:.1f}"


def _share(row: dict) -> str:
    return "failed" if "error" in row else f"{100 * row['mean']:.1f} ± {100 * row['mean_stderr']:.1f}"


def science_qa(record: dict, folder: Path | None = None) -> list[str]:
    """Return the model, LatentLLM's Table 4 of it, one table a component, and the radars of the paper's Figure 6."""
    config = record["config"]
    rows = [_by_column(row) for row in record["rows"]]
    dense, shown = rows[0], [row for row in rows if "case" in row]
    before, after = config["perplexity"].values()
    asked = ", ".join(f"{n} of {kind}" for kind, n in config["questions"].items())
    text, fitted = config["perplexity_text"], config["calibration"]
    lines = [
        f"{dense['parameters'] / 1e6:.1f} million parameters. Asked: {asked}; {config['chance']:.1%} can be guessed.",
        "Natural science stands for colour, shape and count, social science for position and presence, "
        "language science",
        "for texts and words; the grade is three times the number of wrong choices.",
        f"Calibrated on {fitted['samples']} examples of `{fitted['source']}`. Training moves the language model's",
        f"perplexity on {windows(text)} of `{text['source']}` from {number(before)} to {number(after)}.",
        "Accuracy in percent, ± one standard error; the mean is over all questions.",
        "",
        *_table_4([], [row for row in rows if "case" not in row]),
        "",
    ]
    for case in dict.fromkeys(row["case"] for row in shown):
        mine = sorted((row for row in shown if row["case"] == case), key=lambda row: (row["sparsity"], row["setting"]))
        means = by_sparsity(mine, _share, head="all questions", tight=True)
        lines += [f"### Compressed: {case}", "", *means, "", *_table_4([], [dense, *mine]), ""]
    lines += ["### Language model alone, by column (LatentLLM, Figure 6)", ""]
    return lines + _radars("science_qa", dense, [row for row in shown if row["case"] == "language"], folder)


def _by_column(row: dict) -> dict:
    """Return a row with its columns as kinds of question."""
    columns = {name: found for name, found in row["columns"].items() if found["samples"]}
    return row | {
        **{"accuracy": {name: found["acc"] for name, found in columns.items()}, "mean": row["acc"]},
        **{"stderr": {name: found["acc_stderr"] for name, found in columns.items()}, "mean_stderr": row["acc_stderr"]},
        "setting": row.get("setting", row["name"]),
    }


def _gain(found: dict, worse: str, better: str) -> str:
    """Return in words whether the second is better, with the standard error of a difference of two samples."""
    pairs = {s: (found[worse, s], found[better, s]) for name, s in found if name == worse and (better, s) in found}
    pairs = {s: both for s, both in sorted(pairs.items()) if not any("error" in row for row in both)}
    if not pairs:
        return f"- {worse} to {better}: not measured."
    points = {s: b["mean"] - a["mean"] for s, (a, b) in pairs.items()}
    noise = {s: 2 * math.hypot(a["mean_stderr"], b["mean_stderr"]) for s, (a, b) in pairs.items()}
    verdict = {
        "holds": [s for s in pairs if points[s] > noise[s]],
        "does not hold": [s for s in pairs if points[s] < -noise[s]],
        "within two standard errors": [s for s in pairs if abs(points[s]) <= noise[s]],
    }
    said = "; ".join(f"**{what}** at {', '.join(f'{s:.0%}' for s in at)}" for what, at in verdict.items() if at)
    return f"- {worse} to {better}: {said} ({', '.join(f'{100 * p:+.1f}' for p in points.values())})."


def qk_norm(record: dict) -> list[str]:
    """Return settings and forms by sparsity."""
    rows = {(row["setting"], row["form"], row["sparsity"]): number(row["perplexity"]) for row in compressed(record)}
    sparsities = sorted({s for *_, s in rows})
    body = [
        [*names, *(rows.get((*names, s), "") for s in sparsities)]
        for names in dict.fromkeys((setting, form) for setting, form, _ in rows)
    ]
    head = ["", "queries and keys; or what norms divide by", *(f"{s:.0%}" for s in sparsities)]
    return [f"Dense: {number(dense_of(record)['perplexity'])}.", "", *table(head, body)]


def experts(record: dict) -> list[str]:
    dense, *rows = record["rows"]
    fewest = {row["windows"]: f"{row['windows']} windows, fewest tokens {row['fewest']:.0f}" for row in rows}
    cells = {(row["name"], fewest[row["windows"]]): f"{row['perplexity']:.3f}" for row in rows}
    return [f"Perplexity; dense {dense['perplexity']:.3f}.", "", *crossed(cells, head="fitted to")]


def fewer_experts(record: dict) -> list[str]:
    """Write a table for every model, kind of calibration and text; beside the default, how many experts stay."""
    found: list[str] = []
    dense = {row["model"]: row["perplexity"] for row in record["rows"] if row["setting"] == "dense"}
    rows = [row for row in record["rows"] if row["setting"] != "dense"]
    for model, calibrated in dict.fromkeys((row["model"], row["calibrated"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["calibrated"]) == (model, calibrated)]
        for text in dense[model]:
            told = f"Perplexity on `{text}`, {model}, calibrated on {calibrated}; dense {dense[model][text]:.3f}"
            found += [f"{told}. In brackets the experts of 16 that stay:", ""]
            found += [*by_sparsity(mine, lambda row, text=text: _with_kept(row, text)), ""]
    return found[:-1]


def _with_kept(row: dict, text: str) -> str:
    return f"{row['perplexity'][text]:.3f}" + (f" ({row['kept']})" if row["kept"] < 16 else "")
