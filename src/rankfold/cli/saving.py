"""Lines on what an export keeps of the saving, and the options that keep all of it."""

from pathlib import Path

__all__ = ["exported_as_stock", "show_kept"]

MOST = 0.995  # of the saving: what a line is not worth
TARGETS = {"stock": "stock", "gguf": "stock", "deci": "llama.cpp", "gguf-deci": "llama.cpp"}  # of each format


def exported_as_stock(folder: Path, record: dict) -> dict | None:
    """Return what a stock export of a result would keep; ``None`` where there is none, or it keeps everything."""
    from ..exports.kept import stock_parameters

    if "before" in record or record["plan"].get("part") not in (None, "language"):
        return None
    exported, dense, now = stock_parameters(folder), record["plan"]["parameters"], record["counts"]["parameters"]
    if exported is None or dense <= now:
        return None
    return {"parameters": exported, "saving_kept": max(0.0, (dense - exported) / (dense - now))}


def show_kept(kept: float, parameters: int, format: str, folder: Path, out) -> None:
    """Print one line on what is left of the saving, the options that keep it, and what that costs by the plan.

    Args:
        kept: part of the saving.
        parameters: of the export.
        format: of the export.
        folder: of the compressed checkpoint; nothing is known of a target where it has no record.
        out: console.
    """
    from ..report.commands import options_for_target
    from ..report.record import read_record

    if kept >= MOST:
        return
    line = f"exported with --format {format} it has {parameters:,} parameters: {kept:.0%} of the saving is left"
    record = read_record(folder) if (folder / "rankfold.json").exists() else None
    options = record and options_for_target(record, TARGETS[format])
    if options:
        line += f"; compress with {options} to keep all of it{_cost(record, TARGETS[format])}"
    out.print(line, soft_wrap=True)


def _cost(record: dict, target: str) -> str:
    """Name the expected divergence of both models, where ranks were chosen by it."""
    facts = record["plan"]["facts"]
    if target != "stock" or not {"divergence_for_stock", "divergence"} <= facts.keys():
        return ""
    return (
        f", at an expected divergence from the dense model of {facts['divergence_for_stock']:.4f} nats a token in place of "
        f"{sum(facts['divergence'].values()):.4f}"
    )
