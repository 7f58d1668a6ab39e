"""One function for every kind of calibration data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .._utils.present import present
from .._utils.processes import from_first, on_first, process_count
from .._utils.sizes import plural
from ..errors import DataError, OptionError
from .built_in import BUILT_IN, MIXTURES
from .calibration_data import CalibrationData
from .hub import ALIASES, HUB, image_text_rows
from .image_text import has_images, samples_of_examples
from .images import samples_of_images
from .in_memory import is_batch, samples_in_memory
from .mixing import DrawOptions, expanded, shares_of
from .streaming import text_or_pieces
from .text import LONGEST_NAME, named_column
from .text_samples import samples_of_texts


def load_calibration(
    data: Any,
    model: Any,
    *,
    tokenizer: Any = None,
    num_samples: int = 128,
    max_length: int = 2048,
    seed: int = 0,
    text_column: str = "text",
    shards: int = 1,
) -> CalibrationData:
    """Load the samples that a model is calibrated on.

    MoDeGPT calibrates on 128 x 2048 tokens (its Sec. 4.1), LatentLLM on 64 x 2048 (its Sec. 5). A few more samples of
    the same draw are held out: nothing is fitted to them, and they show what the compression does to text it has not
    seen. That is one for eight samples, at least one and of texts at most 8; where there are too few samples, they are
    taken out of these. A single sample is fitted.

    Args:
        data: one of

            - the name of a text: ``wikitext2``, ``ptb``, ``c4``, ``languages``, ``alpaca``; ``ALIAS:FILE``, the rows of
              a local copy; a text file, or a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file with rows
              of text or of chats; ``pydoc`` and ``python-source``, which ship with Python; ``self``, text that the
              model writes; ``mixture``, several of these (:data:`.built_in.MIXTURES`).
            - several names in a list, mixed in equal shares, or name -> share, any positive numbers. Each gives its
              share of all samples in a random order; what one lacks the others give (:mod:`.mixing`).
            - a list of texts. A list of strings is one of names if each string is an alias or an existing file, and one
              of texts if none is and some string has white space in it or more than 255 characters. Other lists are
              refused.
            - a ``datasets.Dataset`` or ``IterableDataset``, or a list of rows; chats (``messages``) are written by the
              chat template.
            - token ids: a tensor ``(N, T)``, a list of tensors ``(T,)`` or of lists of ids, or rows or batches with
              ``input_ids``, such as those of a ``DataLoader``. Padding is left out by the ``attention_mask``. Rows of
              several lengths run one by one.
            - for a part that takes images: a folder, a ``.parquet`` file, a ``.jsonl`` file with paths,
              ``hub:OWNER/NAME``, rows with an image, Pillow images, or pixels ``(N, C, H, W)``.
            - for a model of images and text: a ``.jsonl`` file, ``hub:OWNER/NAME`` or rows with ``text`` or
              ``question``, ``image`` and perhaps ``answer``.
            - a :class:`CalibrationData`, which is returned as it is.
        model: an open model (:func:`rankfold.open_model`).
        tokenizer: in place of the model's own; for images, a processor.
        num_samples: ``>= 1``, and at least one for every text; of all texts together. There may be fewer.
        max_length: tokens of a sample, ``>= 2``; clamped to the model's context, and to the length of a short text.
            Image-text examples are not cut.
        seed: of the draw, and of the order of texts.
        text_column: column of the text, or of the images of a part that takes images; ``image`` by default there.
        shards: contiguous parts that are measured one by one, between 1 and the number of samples. Sums of floats
            depend on them, so equal shards give equal bytes, whatever number of processes shares them.

    Raises:
        DataError: too little data, or none that the model can run on.
        OptionError: a number out of range, a text that is named twice, fewer shards than processes, or ``data`` of no
            kind above.
        CheckpointError: the hub cannot be reached, or the model has no tokenizer.
    """
    if isinstance(data, CalibrationData):
        return data
    if shards < process_count():
        raise OptionError(f"shards must be >= {process_count()}, the number of processes that share them, got {shards}")
    options = DrawOptions(num_samples, max_length, seed, text_column)
    found = load_undivided(data, model, options, tokenizer)
    if shards > len(found.ids):
        raise OptionError(
            f"{plural(len(found.ids), 'sample')} cannot be cut into {shards} shards, one a process or more; give more "
            "samples, or start fewer processes"
        )
    return replace(found, shards=shards)


def load_undivided(data, model, options: DrawOptions, tokenizer=None) -> CalibrationData:
    """Load samples that the processes of a run do not share by shards; see :func:`load_calibration`.

    The first process loads them, and sends them to the others. Examples, which files are read for, cannot be sent: each
    process draws them, and all must have drawn the same.

    Raises:
        DataError: they have not.
    """

    def load() -> CalibrationData:
        return _load(data, model, tokenizer, options)

    tokens = on_first(load)
    sent = from_first(lambda: _sendable(present(tokens)))
    if isinstance(sent, CalibrationData):
        return sent
    tokens = tokens or load()
    if tokens.describe() != sent:
        raise DataError(
            "the processes of this run read different samples; give files that stay the same while it lasts"
        )
    return tokens


def _sendable(tokens: CalibrationData) -> CalibrationData | dict[str, Any]:
    return tokens if isinstance(tokens.ids, Tensor) else tokens.describe()


def _load(data, model, tokenizer, options: DrawOptions) -> CalibrationData:
    shares = named(data)
    if shares is None:
        return samples_in_memory(data, model, options, tokenizer)
    names = [*shares]
    if model.part.takes_images or any(has_images(name, model) for name in names):
        return _images(names, model, options, tokenizer)
    model = model if tokenizer is None else model.with_tokenizer(tokenizer)

    def read(name: str, size: int):
        return text_or_pieces(name, column=options.text_column, seed=options.seed, size=size)

    shares = expanded(shares)
    return replace(
        samples_of_texts(shares, model, options, read), text_column=named_column(shares, options.text_column)
    )


def _images(names: list[str], model, options: DrawOptions, processor) -> CalibrationData:
    """Draw images or image-text examples."""
    draw = samples_of_images if model.part.takes_images else samples_of_examples
    if len(names) != 1:
        what = "folder or file of images" if model.part.takes_images else "file of image-text examples"
        raise OptionError(f"only one {what} can be given, got {' and '.join(names)}; put them into one")
    rows = image_text_rows(names[0], options.seed) if names[0].startswith(HUB) else None
    return draw(names[0], rows, model, options, processor)


def named(data) -> dict[str, float] | None:
    """Return the share of every text that is named; ``None`` where ``data`` holds the samples themselves."""
    if isinstance(data, str | Path):
        return shares_of(data)
    if isinstance(data, Mapping):
        if any(hasattr(value, "column_names") for value in data.values()):
            raise OptionError(
                f"the calibration data has several splits; choose one of its splits: {', '.join(map(str, data))}"
            )
        return None if is_batch(data) else shares_of(data)
    if not isinstance(data, list | tuple) or not all(isinstance(one, str | Path) for one in data):
        return None
    named = [one for one in data if _is_name(one)]
    if len(named) == len(data):
        return shares_of(data)
    others = [one for one in data if not _is_name(one)]
    if named:
        raise OptionError(
            f"{str(named[0])[:40]!r} names a text and {others[0][:40]!r} does not; give names alone, or texts as rows: "
            "[{'text': ...}, ...]"
        )
    return None if _are_texts(others) else shares_of(data)


def _is_name(text: str | Path) -> bool:
    """Tell whether a string names a text that is there; a path always does."""
    if isinstance(text, Path) or text in {*ALIASES, *BUILT_IN, *MIXTURES, "self"} or text.startswith(HUB):
        return True
    alias, _, local = text.partition(":")
    return os.path.isfile(os.path.expanduser(local if alias in ALIASES else text))


def _are_texts(strings: Sequence[str]) -> bool:
    return not any(strings) or any(len(text) > LONGEST_NAME or any(map(str.isspace, text)) for text in strings)
