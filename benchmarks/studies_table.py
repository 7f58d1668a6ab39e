"""Tables of the studies, and of the grid of all methods, out of their records."""

import math
import statistics

import latent_table

TITLES = {
    "windows": "Calibration windows (MoDeGPT Fig. 5)",
    "epsilon": "Temperature of the influence allocation (Table 25); in brackets the sparsity of the block that loses most",
    "sparsity": "Sparsity (Table 32)",
    "alone": "One module alone, by a share of its own weights (Table 29)",
    "shares": "Other shares of the modules (Table 31)",
}


def studies(record: dict) -> list[str]:
    """One table a study: settings by what is varied."""
    rows = [row for row in record["rows"] if row["study"]]
    dense = next(row["perplexity"] for row in record["rows"] if not row["study"])
    lines = [*texts(record), f"- dense: {latent_table.number(dense)}", ""]
    for study in dict.fromkeys(row["study"] for row in rows):
        mine = [row for row in rows if row["study"] == study]
        cells = {(row["setting"], row["value"]): _cell(row) for row in mine}
        if study == "alone":
            cells |= {(setting, "slope"): f"{slope:.3f}" for setting, slope in _slopes(mine, dense).items()}
        lines += [f"### {TITLES[study]}", "", *table(cells), ""]
    return lines


def _cell(row: dict) -> str:
    found = latent_table.number(row["perplexity"])
    return f"{found} ({row['largest']:.0%})" if row["study"] == "epsilon" else found


def _slopes(rows: list[dict], dense: float) -> dict[str, float]:
    """Setting -> normalised slope; of settings with a row that knows the module's share."""
    shares, curves = {}, {}
    for row in rows:
        curves.setdefault(row["setting"], {0.0: dense})[float(row["value"].rstrip("%"))] = row["perplexity"]
        shares |= {row["setting"]: row["share"]} if "share" in row else {}
    return {
        name: statistics.linear_regression([*curves[name]], [*curves[name].values()]).slope / shares[name]
        for name in shares
    }


def grid(record: dict) -> list[str]:
    """One table a text: methods by sparsity; then the parameters that are left."""
    rows = [row for row in record["rows"] if row["setting"] != "dense" and "error" not in row]
    dense = next(row for row in record["rows"] if row["setting"] == "dense")
    lines = [*texts(record), ""]
    for text, perplexity in dense["perplexity"].items():
        cells = {(_name(row), f"{row['sparsity']:.0%}"): _score(row, text) for row in rows}
        lines += [f"Perplexity on `{text}`; dense {latent_table.number(perplexity)}:", "", *table(cells), ""]
    sizes = {(_name(row), f"{row['sparsity']:.0%}"): f"{row['parameters'] / 1e6:.2f}" for row in rows}
    lines += [f"Million parameters stored; dense {dense['parameters'] / 1e6:.2f}:", "", *table(sizes), ""]
    failed = [row for row in record["rows"] if "error" in row]
    return [*lines, *(f"- {row['name']} could not be done: {row['error']}" for row in failed), ""]


def _score(row: dict, text: str) -> str:
    """Perplexity, marked where the run itself warned."""
    return latent_table.number(row["perplexity"][text]) + (" (!)" if row["damaged"] else "")


def _name(row: dict) -> str:
    return f"{row['setting']} ({row['mode']})" + (", zeros stay" if row.get("zeros") else "")


def texts(record: dict) -> list[str]:
    config = record["config"]
    calibration, evaluation = config["calibration"], config["evaluation"]
    lines = [f"- calibration: {calibration['samples']} x {calibration['length']} tokens of `{calibration['source']}`"]
    if isinstance(evaluation, dict):
        return [
            *lines,
            f"- evaluation: {evaluation['samples']} x {evaluation['length']} tokens of `{evaluation['source']}`",
        ]
    return lines + [
        f"- evaluation: {text['windows']} x {text['length']} tokens of `{text['text']}`" for text in evaluation
    ]


def table(cells: dict[tuple[str, str], str]) -> list[str]:
    """Names by columns; columns that are numbers ascend, whatever order they were measured in, and others follow."""
    names, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    head = ["", *sorted(columns, key=_place)]
    rows = [[name, *(cells.get((name, column), "") for column in head[1:])] for name in names]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _place(column: str) -> float:
    try:
        return float(column.rstrip("%"))
    except ValueError:
        return math.inf
