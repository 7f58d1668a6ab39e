"""The table of zero-shot accuracies; see render.py."""


def table(record: dict) -> list[str]:
    config, names = record["config"], list(record["config"]["tasks"])
    text = config["calibration"]
    lines = [
        f"- calibration: {text['samples']} x {text['length']} tokens of `{text['source']}`",
        *(f"- {task}: the first {config['limit']} rows of `{file}`" for task, file in config["tasks"].items()),
        f"- lm-eval {config['lm_eval']}, no examples before a question",
        "",
        "| " + " | ".join(["", "sparsity", *names, "mean"]) + " |",
        "|" + "---|" * (len(names) + 3),
    ]
    for row in sorted(record["rows"], key=lambda r: r["sparsity"]):
        values = [(row["tasks"][name]["acc"], row["tasks"][name]["acc_stderr"]) for name in names]
        cells = [f"{value:.3f} ± {error:.3f}" for value, error in [*values, (row["mean"], row["mean_stderr"])]]
        lines.append("| " + " | ".join([row.get("setting", "dense"), f"{row['sparsity']:.0%}", *cells]) + " |")
    return lines
