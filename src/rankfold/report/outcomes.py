"""Words for what a compression did to likelihoods: of the command line, the model card and the table of a comparison."""

__all__ = ["excess_of", "kinds_in", "ratio_text", "recovery_lines", "remark_on", "trained_on", "warnings_of"]


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


def trained_on(recovery: dict) -> str:
    """Return what of a compressed model was trained, on how much of which texts, and towards what."""
    towards = {
        "kl": f"the predictions of {recovery['teacher_name']}",
        "next-token": "the next token",
        "both": f"the predictions of {recovery['teacher_name']} and the next token",
    }
    texts = " + ".join(recovery["texts"])
    return (
        f"{recovery['tuned_parameters']:,} parameters ({recovery['tune']}) trained on {recovery['tokens_seen']:,} tokens of "
        f"{texts} towards {towards[recovery['loss']]}"
    )


def recovery_lines(recovery: dict | None) -> list[str]:
    """Return the lines on a recovery: what was trained, and the perplexity of every text before and after."""
    if recovery is None:
        return []
    kept = "" if recovery["recovered"] else "; nothing was recovered, so the weights are those before training"
    return [trained_on(recovery) + kept] + [
        f"{text}: perplexity {facts['perplexity_before']:.2f} -> {facts['perplexity']:.2f} (dense "
        f"{facts['perplexity_dense']:.2f}) on {facts['sequences']} held-out sequences"
        for text, facts in recovery["held_out"].items()
    ]
