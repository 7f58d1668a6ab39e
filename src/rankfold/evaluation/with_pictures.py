"""ScienceQA asked of a model of images and text, pictures included, by its own processor.

Shape legend: B questions asked together, n tokens of a prompt with those in whose places pictures stand, m tokens
written.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._utils.progress import count_steps
from .._utils.reporting import reporting
from ..data.image_text import Row, inputs_of
from ..data.images import encoded_images, image_paths
from ..data.text import json_rows
from ..errors import CheckpointError, DataError, option
from .generation import ends_alone, generate_ids, text_after
from .science_qa import LETTERS, SCIENCE_QA, by_column, choice_of, mean_and_error, prompt_of

WRITTEN = 16  # tokens: a letter, or `The answer is B.`; LLaVA's script waits for up to 1,024
WAITING = 16  # batches: so many questions are read ahead to find some of one shape


@dataclass
class Asked:
    """One question with its inputs."""

    doc: dict
    inputs: dict[str, Tensor] = field(repr=False)

    @property
    def shapes(self) -> tuple:
        """What has to be equal for questions to be asked together without padding, which models take in many ways."""
        return tuple((name, tuple(value.shape)) for name, value in sorted(self.inputs.items()))


def ask(network, processor, file: Path | None, *, limit: int | None = None, batch_size: int = 8) -> dict[str, Any]:
    """Return the accuracy of a model on all questions of ScienceQA; see :func:`answered`.

    Args:
        network: a model of images and text, dense or compressed.
        processor: the model's.
        file: rows as the hub has them, pictures as paths from the folder of the file; ``None``: the test split on the
            hub.
        limit: only the first questions.

    Raises:
        DataError: a row has more choices than letters, or a picture is gone or cannot be read.
        CheckpointError: the hub cannot be reached, or see :func:`answered`.
        NumericsError: see :func:`answered`.
    """
    rows = (rows_of_file(file) if file else _rows_of_hub())[:limit]
    questions = prepared(rows, processor, network.config.image_token_id)
    return answered(network, processor.tokenizer, questions, len(rows), batch_size)


def prepared(rows: list[tuple[dict, Row]], processor, image_token: int) -> Iterator[Asked]:
    """Yield questions with the inputs of the model, one at a time: pictures take memory."""
    return (Asked(row, dict(inputs_of(given, processor, image_token, asking=True))) for row, given in rows)


def answered(network, tokenizer, questions: Iterable[Asked], total: int, batch_size: int) -> dict[str, Any]:
    """Return the accuracy of what a model writes to questions, greedily, as :meth:`~.tasks.Questions.measure` reports
    it.

    Args:
        batch_size: questions asked together, where their inputs have one shape; nothing is padded.

    Returns:
        ``acc``, and ``answered``, the share of answers that name a choice at all, each with its ``_stderr``;
        ``columns``.

    Raises:
        CheckpointError: the model's generation settings are damaged.
        NumericsError: the model predicts NaN.
    """
    samples = []
    with count_steps("answering scienceqa", total) as advance:
        for some in together(questions, batch_size):
            for one, text in zip(some, _answers(network, tokenizer, some), strict=True):
                chosen = choice_of(text, len(one.doc["choices"]))
                right, named = float(chosen == one.doc["answer"]), float(chosen is not None)
                samples.append({"doc": one.doc, "acc": right, "answered": named})
                advance()
    facts = {}
    for metric in ("acc", "answered"):
        facts |= mean_and_error(metric, [sample[metric] for sample in samples])
    return facts | {"samples": len(samples), "num_fewshot": 0, "version": "LLaVA", "columns": by_column(samples)}


def together(questions: Iterable[Asked], most: int) -> Iterator[list[Asked]]:
    """Yield questions in groups of one shape, of at most ``most``; some wait for others, in memory."""
    waiting: dict[tuple, list[Asked]] = {}
    for question in questions:
        group = waiting.setdefault(question.shapes, [])
        group.append(question)
        if len(group) == most:
            yield waiting.pop(question.shapes)
        elif sum(map(len, waiting.values())) >= WAITING * most:
            yield waiting.pop(max(waiting, key=lambda shapes: len(waiting[shapes])))
    yield from waiting.values()


def _answers(network, tokenizer, some: list[Asked]) -> list[str]:
    """Return what the model writes after each of the questions, greedily."""
    inputs = {name: torch.cat([one.inputs[name] for one in some]).to(network.device) for name in some[0].inputs}
    ids = inputs.pop("input_ids")  # (B, n)
    inputs.pop("attention_mask", None)
    inputs = {name: value.to(network.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with ends_alone(network):
        written = generate_ids(network, tokenizer, ids, max_new_tokens=WRITTEN, others=inputs)  # (B, m)
    return [text_after(tokenizer, *pair) for pair in zip(ids.cpu(), written, strict=True)]


def rows_of_file(file: Path) -> list[tuple[dict, Row]]:
    return [_given(row, f"{file}, {where}", image_paths(row, where, file)) for where, row in json_rows(file)]


def _rows_of_hub() -> list[tuple[dict, Row]]:
    import datasets

    name = SCIENCE_QA["dataset_path"]
    advice = f"without the hub, put its rows into a folder and name it by {option('include_path')}"
    with reporting(CheckpointError, "the questions of scienceqa cannot be read", advice):
        rows: Any = datasets.load_dataset(name, split="test").cast_column("image", datasets.Image(decode=False))
    places = [(f"{name}, row {number}", row) for number, row in enumerate(rows, 1)]
    return [_given(row, where, encoded_images(row, where)) for where, row in places]


def _given(row: dict, where: str, images: tuple) -> tuple[dict, Row]:
    if len(row["choices"]) > len(LETTERS):
        raise DataError(
            f"{where} has {len(row['choices'])} choices; a model answers by one of {LETTERS}, so leave the row out"
        )
    return row, Row(where, images, prompt_of(row), None)
