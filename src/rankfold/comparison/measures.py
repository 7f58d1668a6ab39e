"""What is measured of every model of a comparison: functions of a model that return numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from .._utils.processes import from_first
from ..data.batches import digest_of
from ..data.calibration_data import shown
from ..data.text import Text, named_column
from ..errors import DataError
from ..evaluation.speed import lengths, speed
from ..evaluation.tasks import Questions
from ..evaluation.text import Texts, timed_perplexity
from ..evaluation.writing import LAST_WORD, Writing
from ..models.dense_model import DenseModel

DENSE, COMPRESSED = "dense", "compressed"


class Measure(Protocol):
    """One kind of number."""

    def describe(self) -> dict | list:
        """What the numbers depend on beside the model; JSON."""
        ...

    def __call__(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict | list:
        """The numbers of ``model``; JSON. ``dense()`` gives the dense model, to measure beside it.

        All processes call this; those that share it, and those for which the first measures alone, get the same.
        """
        ...


@dataclass(frozen=True)
class Measures:
    """Everything that is measured.

    Args:
        functions: name in the record -> measure.
        load_dense: loads the dense model, in the precision that compressed ones are written in.
    """

    functions: Mapping[str, Measure]
    load_dense: Callable[[], PreTrainedModel]

    def describe(self) -> dict:
        return {name: function.describe() for name, function in self.functions.items()}

    def __call__(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict:
        return {name: function(model, dense) for name, function in self.functions.items()}


class Perplexities:
    """Perplexity on several texts.

    Args:
        source: whose tokenizer is used.
        texts: which, and how; windows are clamped to the model's context.

    Raises:
        OptionError: a number out of range, or a text given twice.
        DataError: a text that cannot be read or is shorter than a window (named).
    """

    def __init__(self, source: DenseModel, texts: Texts):
        self.texts = texts.read()
        length = min(texts.max_length, source.context_length)
        self.windows = [_windows(source, texts, text, length) for text in self.texts]
        self.labels, self.limits = _labels(texts.names), [texts.limit_of(name) for name in texts.names]
        self.text_column = named_column(texts.names, texts.text_column)

    def describe(self) -> list[dict]:
        return [
            {
                "text": label,
                "origin": text.origin,
                "limit": limit,
                **({"text_column": self.text_column} if self.text_column else {}),
                "windows": len(windows),
                "length": windows.shape[1],
                "sha256": digest_of(windows),
            }
            for label, text, windows, limit in zip(self.labels, self.texts, self.windows, self.limits, strict=True)
        ]

    def __call__(self, model: PreTrainedModel, dense) -> list[dict]:
        return [
            {"text": label, **timed_perplexity(model, windows, label)}
            for label, windows in zip(self.labels, self.windows, strict=True)
        ]


def _labels(names: Sequence[str]) -> list[str]:
    """Names without folders of this machine, except those that tell texts apart."""
    short = [shown(name) for name in names]
    for folders in range(max(len(Path(name).parts) for name in names)):
        labels = [
            shown(name, folders) if short.count(label) > 1 else label for name, label in zip(names, short, strict=True)
        ]
        if len(set(labels)) == len(labels):
            break
    return labels


def _windows(source: DenseModel, texts: Texts, text: Text, length: int) -> torch.Tensor:
    try:
        return texts.windows_of(text, source.tokenizer, source.name, source.config, length)
    except DataError as error:
        raise DataError(f"{text.name}: {error}") from error


class Accuracies:
    """Zero-shot tasks by lm-eval; see :class:`~rankfold.evaluation.tasks.Questions`.

    Raises:
        OptionError, DataError: see :meth:`~rankfold.evaluation.tasks.Questions.check`.
    """

    def __init__(self, source: DenseModel, questions: Questions):
        questions.check()
        self.source, self.questions = source, questions

    def describe(self) -> dict:
        folder, found = self.questions.folder, asdict(self.questions)
        return found if folder is None else found | {"folder": shown(folder), "sha256": self.questions.digest()}

    def __call__(self, model: PreTrainedModel, dense) -> dict[str, dict]:
        processors = self.source.processors
        return self.questions.measure(model, self.source.tokenizer, processor=lambda: processors.processor)


class Generations:
    """What a model writes, beside the dense model's text; see :class:`~rankfold.evaluation.writing.Writing`.

    Raises:
        OptionError, DataError: see :meth:`~rankfold.evaluation.writing.Writing.prompts`.
    """

    def __init__(self, source: DenseModel, writing: Writing):
        self.kinds = [*writing.prompts()]
        self.source, self.writing = source, writing
        self._dense: list[list[int]] | None = None  # what the dense model writes

    def describe(self) -> dict:
        found, folder = {"limit": self.writing.limit, "kinds": self.kinds}, self.writing.folder
        return found if folder is None or LAST_WORD not in self.kinds else found | {"folder": shown(folder)}

    def __call__(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict:
        return from_first(lambda: self._measured(model, dense))

    def _measured(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict:
        tokenizer = self.source.tokenizer
        if self._dense is None:
            self._dense = self.writing.free_text(dense(), tokenizer)
        return self.writing.measure(model, tokenizer, self._dense)


class Speed:
    """Tokens per second beside the dense model, in turns; see :func:`~rankfold.evaluation.speed.speed`.

    Args:
        context: tokens the model has positions for; prompts are shortened to fit.
    """

    def __init__(self, context: int, *, batch: int = 8, repeats: int = 5):
        prompt, steps = lengths(context)
        self.options = {"batch": batch, "prompt": prompt, "steps": steps, "repeats": repeats}
        self._dense: PreTrainedModel | None = None  # kept between models: loading it takes longer than a round

    def describe(self) -> dict:
        return self.options

    def __call__(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict:
        return from_first(lambda: self._measured(model, dense))

    def _measured(self, model: PreTrainedModel, dense: Callable[[], PreTrainedModel]) -> dict:
        self._dense = self._dense or dense()
        models = {DENSE: self._dense} | ({} if model is self._dense else {COMPRESSED: model})
        found = speed(models, **self.options)
        every = found.pop("models")
        return found | {"dense": every[DENSE], **every.get(COMPRESSED, every[DENSE])}
