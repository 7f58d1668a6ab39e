"""Everything that is measured of a named model, loaded once."""

from pathlib import Path
from typing import Any

from .._utils.processes import from_first
from .._utils.progress import one_run
from ..checkpoint.load import load_model, load_processor, load_tokenizer
from ..checkpoint.streamed import open_streamed
from ..errors import OptionError, option
from ..models.auto_classes import check_writes
from ..models.given import resolve_model
from ..models.whole import read_config
from ..report.record import versions
from .cost import Cost
from .tasks import Questions
from .text import Texts
from .writing import Writing


@one_run()
def evaluate(
    model: str | Path,
    *,
    texts: Texts | None = None,
    questions: Questions | None = None,
    cost: Cost | None = None,
    writing: Writing | None = None,
    dtype: str = "auto",
    device: str = "auto",
    stream: bool = False,
) -> dict[str, Any]:
    """Perplexity on texts, accuracy on tasks, what a model writes, and its cost: whichever is asked for.

    Several processes share the texts, and the questions without pictures; the first does the others alone.

    Args:
        model: hub id, folder (dense or compressed), or ``.gguf`` file.
        dtype: ``auto`` (as stored) or a dtype.
        stream: read the model one block at a time; of texts alone.

    Returns:
        ``{"model", "versions", "texts": [...], "tasks": {...}, "generation": {...}, "cost": {...}}``, the last four
        where asked for; see :meth:`Texts.measure`, :meth:`Questions.measure`, :meth:`Writing.measure` and
        :meth:`Cost.measure`.

    Raises:
        OptionError: nothing is asked for; or see the four.
        DataError, CheckpointError, NumericsError: with one line saying what to do.
    """
    others = f"{option('tasks')}, {option('generation')}", option("speed")
    if not (texts or questions or cost or writing):
        raise OptionError(f"nothing to evaluate; give {option('text')}, {' or '.join(others)}")
    if stream and (questions or cost or writing):
        raise OptionError(
            f"{option('stream')} reads one block at a time, for texts; leave it out for {' and '.join(others)}"
        )
    if questions:
        questions.check()
    if cost:
        cost.check(str(model))
    if writing:
        writing.prompts()
    for baseline in {cost and cost.against, writing and writing.baseline} - {None}:
        _check_baseline(str(baseline))
    dense = from_first(lambda: _dense_texts(writing, model, dtype, device)) if writing and writing.baseline else None
    read = texts.read() if texts else []
    network: Any = (open_streamed if stream else load_model)(model, dtype=dtype, device=device)
    check_writes(network.config, str(model))
    tokenizer = load_tokenizer(model) if texts or questions or writing else None
    result: dict[str, Any] = {"model": str(model), "versions": versions(*(["lm_eval"] if questions else []))}
    if texts:
        result["texts"] = texts.measure(str(model), network, tokenizer, read)
    if questions:
        result["tasks"] = questions.measure(network, tokenizer, processor=lambda: load_processor(model))
    if writing:
        result["generation"] = from_first(lambda: writing.measure(network, tokenizer, dense))
    if cost:
        result["cost"] = from_first(lambda: _cost(cost, str(model), network, dtype, device))
    return result


def evaluate_text(
    model: str | Path,
    text: str | Path,
    *,
    max_length: int = 2048,
    limit: int | None = None,
    text_column: str = "text",
    dtype: str = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Load a model and compute its perplexity on a text source; see :func:`~rankfold.evaluation.perplexity.perplexity`.

    Warns where a compressed model was calibrated on the very text.

    Raises:
        OptionError, DataError, CheckpointError: with one line saying what to do.
    """
    texts = Texts((str(text),), max_length, limit, text_column)
    found = evaluate(model, texts=texts, dtype=dtype, device=device)
    return {"model": found["model"], **found["texts"][0]}


def _cost(cost: Cost, name: str, network, dtype: str, device: str) -> dict[str, Any]:
    models = {cost.against: load_model(cost.against, dtype=dtype, device=device)} if cost.against else {}
    return cost.measure(models | {name: network})


def _check_baseline(name: str) -> None:
    """Refuse what is no model that writes text before anything is measured: a baseline is loaded when it is needed."""
    path, weights = resolve_model(name)
    if weights is not None:  # a GGUF file is of a decoder
        check_writes(read_config(path), name)


def _dense_texts(writing: Writing, model: str | Path, dtype: str, device: str) -> list[list[int]]:
    """Return the tokens that the model to compare with writes; it is gone afterwards."""
    name = str(writing.baseline)
    tokenizer = load_tokenizer(name)
    if tokenizer.get_vocab() != load_tokenizer(model).get_vocab():
        raise OptionError(
            f"{option('baseline', name)} has another vocabulary, so tokens cannot be compared; give the dense model "
            "that it was compressed from"
        )
    return writing.free_text(load_model(name, dtype=dtype, device=device), tokenizer)
