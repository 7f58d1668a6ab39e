"""Tables of the studies, and of the grid of all methods, out of their records."""

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
        lines += [f"### {TITLES[study]}", "", *_table(cells), ""]
    return lines


def _cell(row: dict) -> str:
    found = latent_table.number(row["perplexity"])
    return f"{found} ({row['largest']:.0%})" if row["study"] == "epsilon" else found


def grid(record: dict) -> list[str]:
    """One table a text: methods by sparsity; then the parameters that are left."""
    rows = [row for row in record["rows"] if row["setting"] != "dense" and "error" not in row]
    dense = next(row for row in record["rows"] if row["setting"] == "dense")
    lines = [*texts(record), ""]
    for text, perplexity in dense["perplexity"].items():
        cells = {(_name(row), f"{row['sparsity']:.0%}"): latent_table.number(row["perplexity"][text]) for row in rows}
        lines += [f"Perplexity on `{text}`; dense {latent_table.number(perplexity)}:", "", *_table(cells), ""]
    sizes = {(_name(row), f"{row['sparsity']:.0%}"): f"{row['parameters'] / 1e6:.2f}" for row in rows}
    lines += [f"Million parameters stored; dense {dense['parameters'] / 1e6:.2f}:", "", *_table(sizes), ""]
    failed = [row for row in record["rows"] if "error" in row]
    return [*lines, *(f"- {row['name']} could not be done: {row['error']}" for row in failed), ""]


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


def _table(cells: dict[tuple[str, str], str]) -> list[str]:
    names, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    head = ["", *columns]
    rows = [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
