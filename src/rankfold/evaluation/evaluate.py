"""Everything that is measured of a named model, loaded once."""

from importlib import metadata
from pathlib import Path
from typing import Any

from .._utils.progress import one_run
from ..checkpoint.load import load_model, load_tokenizer
from ..checkpoint.streamed import open_streamed
from ..errors import OptionError, option
from ..models.auto_classes import check_writes
from ..report.record import versions
from .cost import Cost
from .tasks import Questions
from .text import Texts


@one_run()
def evaluate(
    model: str | Path,
    *,
    texts: Texts | None = None,
    questions: Questions | None = None,
    cost: Cost | None = None,
    dtype: str = "auto",
    device: str = "auto",
    stream: bool = False,
) -> dict:
    """Perplexity on texts, accuracy on tasks, and cost of a model: whichever is asked for.

    Args:
        model: hub id, folder (dense or compressed), or ``.gguf`` file.
        dtype: ``auto`` (as stored) or a dtype.
        stream: read the model one block at a time; of texts alone.

    Returns:
        ``{"model", "versions", "texts": [...], "tasks": {...}, "cost": {...}}``, the last three where asked for; see
        :meth:`Texts.measure`, :meth:`Questions.measure` and :meth:`Cost.measure`.

    Raises:
        OptionError: nothing is asked for; or see the three.
        DataError, CheckpointError, NumericsError: with one line saying what to do.
    """
    if not (texts or questions or cost):
        raise OptionError(f"nothing to evaluate; give {option('text')}, {option('tasks')} or {option('speed')}")
    if stream and (questions or cost):
        raise OptionError(
            f"{option('stream')} reads one block at a time, for texts; leave it out for {option('tasks')} and {option('speed')}"
        )
    if questions:
        questions.check()
    if cost:
        cost.check(str(model))
    read = texts.read() if texts else []
    network: Any = (open_streamed if stream else load_model)(model, dtype=dtype, device=device)
    check_writes(network.config, str(model))
    tokenizer = load_tokenizer(model) if texts or questions else None
    result: dict[str, Any] = {"model": str(model), "versions": versions()}
    if texts:
        result["texts"] = texts.measure(str(model), network, tokenizer, read)
    if questions:
        result["versions"]["lm_eval"] = metadata.version("lm_eval")
        result["tasks"] = questions.measure(network, tokenizer)
    if cost:
        models = {cost.against: load_model(cost.against, dtype=dtype, device=device)} if cost.against else {}
        result["cost"] = cost.measure(models | {str(model): network})
    return result
