"""The page of `--keep-quality`: what was asked for, predicted and kept, and the sparsity that came out."""

from .tables import table, windows


def keep_quality(record: dict) -> list[str]:
    config = record["config"]
    calibration = config["calibration"]
    head = ["method", "asked", "sparsity", "predicted", *config["kept_of"], "compressions"]
    return [
        f"- calibration: {windows(calibration)} of `{calibration['source']}`, and {config['held_out']} held out",
        f"- other text: {windows(config['evaluation'])} of `{config['evaluation']['source']}`",
        "",
        *table(head, [cells(row, config["kept_of"]) for row in record["rows"]]),
    ]


def cells(row: dict, kept_of: list[str]) -> list[str]:
    name = [f"`{row['method']}`", f"{row['asked']:g}"]
    if "error" in row:
        return [*name, *["–"] * (2 + len(kept_of)), row["error"]]
    predicted = "–" if row["predicted"] is None else f"{row['predicted']:.3f}"
    kept = [f"{row['kept'][text]:.3f}" for text in kept_of]
    return [*name, f"{row['sparsity']:.1%}", predicted, *kept, str(row["compressions"])]
