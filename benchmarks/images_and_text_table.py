"""docs/results/images_and_text.md out of the record of images_and_text.py: LatentLLM's Table 4, and its order of methods."""

import math
from itertools import pairwise

PAPERS_ORDER = (("identity",), ("hessian", "l2"), ("covariance",), ("rootcov",), ("latentllm (joint)",))  # worst first


def table(record: dict) -> list[str]:
    config, rows = record["config"], record["rows"]
    dense = next(row for row in rows if row["name"] == "dense")
    kinds = list(dense["accuracy"])
    asked = ", ".join(f"{n} of {kind}" for kind, n in config["questions"].items())
    texts = config["calibration"].values()
    fitted = " or ".join(
        f"{some['samples']} examples ({some['tokens']} tokens) of `{some['source']}`" for some in texts
    )
    lines = [
        f"{dense['parameters'] / 1e3:.0f} thousand parameters, calibrated on {fitted}. Asked: {asked};",
        "`text` is about a description in the place of a picture. Accuracy in percent, ± one standard error.",
        "",
    ]
    for case in dict.fromkeys(row["case"] for row in rows if "case" in row):
        mine = {(row["setting"], row["sparsity"]): row for row in rows if row.get("case") == case}
        lines += [f"### Compressed: {case}", "", *by_sparsity(mine, dense), "", *orders(mine), ""]
    for case in dict.fromkeys(row["case"] for row in rows if "case" in row):
        mine = [row for row in rows if row.get("case") == case]
        lines += [f"### By kind of question: {case}", "", *by_kind(mine, dense, kinds, config["chance"]), ""]
    return lines


def by_sparsity(found: dict, dense: dict) -> list[str]:
    """Mean of all kinds, methods against sparsity."""
    sparsities = sorted({sparsity for _, sparsity in found})
    lines = [
        f"| mean of all kinds | {' | '.join(f'{s:.0%}' for s in sparsities)} |",
        "|---" * (1 + len(sparsities)) + "|",
    ]
    lines.append(f"| dense: {share(dense)} |" + " |" * len(sparsities))
    for setting in dict.fromkeys(setting for setting, _ in found):
        cells = [share(found[setting, s]) if (setting, s) in found else "" for s in sparsities]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


def by_kind(rows: list[dict], dense: dict, kinds: list[str], chance: dict) -> list[str]:
    """The shape of the paper's Table 4."""
    lines = [f"| | sparsity | {' | '.join(kinds)} | mean |", "|---" * (3 + len(kinds)) + "|"]
    guessed = [f"{100 * chance[kind]:.1f}" for kind in kinds]
    lines.append(
        f"| the most frequent answer | | {' | '.join(guessed)} | {100 * sum(chance.values()) / len(chance):.1f} |"
    )
    for row in [dense, *sorted(rows, key=lambda row: row["sparsity"])]:
        cells = (
            [row["error"], *[""] * len(kinds)]
            if "error" in row
            else [shown(row, kind) for kind in kinds] + [share(row)]
        )
        lines.append(f"| {row.get('setting', 'dense')} | {row['sparsity']:.0%} | {' | '.join(cells)} |")
    return lines


def shown(row: dict, kind: str) -> str:
    return f"{100 * row['accuracy'][kind]:.1f} ± {100 * row['stderr'][kind]:.1f}"


def share(row: dict) -> str:
    return "failed" if "error" in row else f"{100 * row['mean']:.1f} ± {100 * row['mean_stderr']:.1f}"


def orders(found: dict) -> list[str]:
    """Which of the paper's orders these numbers show, where they differ by more than two standard errors."""
    lines = ["The paper's order, worse first, in points of the mean that the second gains:", ""]
    for worse, better in pairwise(PAPERS_ORDER):
        lines += [gain(found, a, b) for a in worse for b in better]
    return lines


def gain(found: dict, worse: str, better: str) -> str:
    """In words, with the standard error of a difference of two samples."""
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
