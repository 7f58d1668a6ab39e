"""Words for what a compression did to likelihoods: of the command line, the model card and the table of a comparison."""

__all__ = ["excess_of", "kinds_in", "ratio_text", "remark_on", "warnings_of"]


def ratio_text(facts: dict) -> str:
    """Return a ratio of perplexities with its standard error, where the record has one.

    Args:
        facts: ``ratio``, and the ``standard_error`` of its logarithm.
    """
    error = facts.get("standard_error")
    return f"{facts['ratio']:.2f}" + (f" ± {facts['ratio'] * error:.2f}" if error is not None else "")


def remark_on(facts: dict) -> str:
    """Return what else there is to say of a kind of probe text."""
    if facts["is_damaged"]:
        return ": DAMAGED"
    return "" if facts["is_known"] else ": the dense model guesses here"


def kinds_in(probe_texts: dict | None) -> dict[str, dict]:
    """Return what a record says of every kind of probe text; older records say nothing."""
    return (probe_texts or {}).get("kinds") or {}


def excess_of(record: dict) -> str | None:
    """Return why a run removed more than was asked for, where it did; older records do not say."""
    return (record["plan"].get("budget") or {}).get("excess")


def warnings_of(record: dict) -> list[str]:
    """Return every warning of a run record, or of a row of a comparison."""
    held_out, probe_texts = record.get("held_out") or {}, record.get("probe_texts") or {}
    found = [held_out.get("warning"), probe_texts.get("warning"), held_out.get("dense_warning")]
    found += [text.get("warning") for text in (record.get("measures") or {}).get("texts", [])]
    return [warning for warning in found if warning]
