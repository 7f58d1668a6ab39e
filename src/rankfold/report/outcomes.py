"""Words for what a compression did to sizes and likelihoods: for the command line, the model card and tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from .._utils.sizes import plural

Record = Mapping[str, Any]  # of a run, or a part of one
Row = tuple[str, str, str, str]  # what is measured, the dense model's number, the compressed one's, and a remark


def size_rows(plan: Record) -> Iterator[Row]:
    """Yield parameters, weights and cache, each with its change.

    Args:
        plan: :meth:`.Plan.to_dict`, or ``plan`` of a run record.
    """
    for name, key, unit in (
        ("parameters", "parameters", 1),
        ("MiB of weights", "bytes", 2**20),
        ("KV-cache bytes per token", "kv_bytes_per_token", 1),
    ):
        yield name, *change_text(plan[key], plan[f"{key}_after"], unit)


def change_text(before: float, after: float, unit: int = 1) -> tuple[str, str, str]:
    """Return two numbers in a unit, whole ones where it is 1, and the change in percent; none from 0."""
    form = ",.0f" if unit == 1 else ",.1f"
    change = f"{(after - before) / before:+.1%}" if before else ""
    return f"{before / unit:{form}}", f"{after / unit:{form}}", change


def held_out_row(held_out: Record) -> Row:
    """Return the row of the held-out samples: perplexity, or how far an encoder's last states are from dense ones."""
    samples = plural(held_out["windows"], "held-out calibration sample")
    if "state_error" in held_out:
        remark = f"relative error {held_out['state_error']:.3f} on {samples}"
        return "cosine of the last states", "1", f"{held_out['cosine']:.4f}", remark
    return _perplexities("perplexity", held_out, samples)


def kind_rows(probe_texts: Record | None) -> Iterator[Row]:
    """Yield the row of every kind of probe text; none where a record has none."""
    for kind, facts in kinds_in(probe_texts).items():
        yield _perplexities(kind, facts, f"{plural(facts['passages'], 'probe text')}{remark_on(facts)}")


def _perplexities(name: str, facts: Record, where: str) -> Row:
    dense, small = facts["perplexity_dense"], facts["perplexity"]
    return name, f"{dense:.2f}", f"{small:.2f}", f"x {ratio_text(facts)} on {where}"


def ratio_text(facts: Record) -> str:
    """Return a ratio of perplexities with its standard error, where the record has one.

    Args:
        facts: ``ratio``, and the ``standard_error`` of its logarithm.
    """
    error = facts.get("standard_error")
    return f"{facts['ratio']:.2f}" + (f" ± {facts['ratio'] * error:.2f}" if error is not None else "")


def remark_on(facts: Record) -> str:
    """Return what else there is to say of a kind of probe text."""
    if facts["is_damaged"]:
        return ": DAMAGED"
    return "" if facts["is_known"] else ": the dense model guesses here"


def kinds_in(probe_texts: Record | None) -> dict[str, Any]:
    """Return what a record says of every kind of probe text; older records say nothing."""
    return (probe_texts or {}).get("kinds") or {}


def excess_of(record: Record) -> str | None:
    """Return why a run removed more than was asked for, where it did; older records do not say."""
    return (record["plan"].get("budget") or {}).get("excess")


def marked_warnings(record: Record) -> list[tuple[str, str]]:
    """Return a word or two and the sentence of every warning of a run record, or of a row of a comparison."""
    found = [
        ("damaged", _warning(record, "held_out")),
        ("skills lost", _warning(record, "probe_texts")),
        ("guesses", (record.get("held_out") or {}).get("dense_warning")),
        *(("guesses", text.get("warning")) for text in (record.get("measures") or {}).get("texts", [])),
    ]
    return [(mark, warning) for mark, warning in found if warning]


def warnings_of(record: Record) -> list[str]:
    """Return every warning of a run record, or of a row of a comparison."""
    return [warning for _, warning in marked_warnings(record)]


def _warning(record: Record, name: str) -> str | None:
    """Return the warning of some measurements, after the words that tell when they were made."""
    warning, when = (record.get(name) or {}).get("warning"), before_training(record, name)
    return f"{when}: {warning}" if when and warning else warning


def before_training(record: Record, name: str) -> str:
    """Return what to say of measurements made before training; nothing where there was none, or they were made again.

    Args:
        name: ``held_out`` or ``probe_texts``; older records have those of before training.
    """
    trained = trainings_of(record)
    return "before training" if trained and f"{name}_before" not in trained[-1] else ""


def trainings_of(record: Record) -> list[dict[str, Any]]:
    """Return what a record says of every training that the weights have, the first one first."""
    found, training = [], record.get("recovery")
    while training:
        found += [training] if training["recovered"] else []
        training = training.get("earlier")
    return found[::-1]


def trained_on(recovery: Record) -> str:
    """Return what of a compressed model was trained, on how much of which texts, and towards what."""
    towards = {
        "kl": f"the predictions of {recovery['teacher_name']}",
        "next-token": "the next token",
        "both": f"the predictions of {recovery['teacher_name']} and the next token",
        "states": f"the states after every block of {recovery['teacher_name']}",
    }
    texts = " + ".join(recovery["texts"])
    return (
        f"{plural(recovery['tuned_parameters'], 'parameter')} ({recovery['tune']}) trained on "
        f"{plural(recovery['tokens_seen'], 'token')} of {texts} towards {towards[recovery['loss']]}"
    )


def recovery_lines(record: Record) -> list[str]:
    """Return the lines on a recovery: what was trained, and the perplexity of every text before and after.

    Held-out text comes first, then the kinds of probe texts. Before a training stands the one before it.

    Args:
        record: of the run; there are no lines where nothing was trained.
    """
    recovery = record.get("recovery")
    if recovery is None:
        return []
    reason = recovery.get("unchanged_because") or "no text gains, or one loses too much"  # older records have none
    kept = (
        "" if recovery["recovered"] else f"; nothing was recovered ({reason}), so the weights are those before training"
    )
    undone = "" if recovery["recovered"] else ", undone"
    before = kinds_in(recovery.get("probe_texts_before"))
    probes = recovery["probe_texts_before"] if before else record.get("probe_texts")
    earlier = recovery_lines({**record, "probe_texts": probes, "recovery": recovery.get("earlier")})
    return [
        *earlier,
        trained_on(recovery) + kept,
        *(
            _before_and_after(
                text, facts, facts["perplexity_before"], f"{plural(facts['sequences'], 'held-out sequence')}{undone}"
            )
            for text, facts in recovery["held_out"].items()
        ),
        *(
            _before_and_after(kind, facts, before[kind]["perplexity"], plural(facts["passages"], "probe text"))
            for kind, facts in kinds_in(record.get("probe_texts")).items()
            if kind in before
        ),
    ]


def _before_and_after(text: str, facts: Record, before: float, where: str) -> str:
    dense, after = facts["perplexity_dense"], facts["perplexity"]
    return f"{text}: perplexity {before:.2f} -> {after:.2f} (dense {dense:.2f}) on {where}"
