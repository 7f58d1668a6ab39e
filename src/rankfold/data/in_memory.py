"""Calibration data that the caller holds: texts, rows, token ids, batches, images.

Shape legend: B rows of a batch, T tokens, C channels, H x W pixels.
"""

import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._utils.sizes import plural
from ..errors import DataError, OptionError
from . import streaming
from .batches import Example
from .calibration_data import CalibrationData
from .chats import CHATS, Chat, column_read, is_chat
from .hub import BUFFER, StreamedRows
from .image_text import samples_of_examples
from .images import held_out_images, images_as_data, samples_of_images
from .mixing import DrawOptions, fitted_of, order_of
from .streaming import Pieces
from .text import Text, document_of
from .text_samples import samples_of_texts
from .tokens import check_fits

log = logging.getLogger(__name__)

IDS, MASK, PIXELS = "input_ids", "attention_mask", "pixel_values"
# Inputs of a model that the samples would not be measured with.
NOT_HONOURED = ("position_ids", "token_type_ids", "inputs_embeds", "decoder_input_ids")
TABLES = ("pandas", "polars", "arrow")  # formats of a Dataset that make a table of every row
KINDS = (
    "the name of a text, a list of texts or of names, name -> share, a datasets.Dataset or rows, token ids (N, T), a "
    "list of them, or batches with input_ids"
)


class Given(NamedTuple):
    """What the caller gave, item by item."""

    name: str  # of its type
    first: Any
    in_order: Iterable  # empty, where it is a stream
    drawn: Iterable[tuple[int, Any]]  # with their numbers; in random order, where items can be read in any order
    draw: str  # how, for the record
    is_stream: bool


def is_batch(data: Mapping) -> bool:
    """Tell whether a mapping is a batch of a model's inputs."""
    return IDS in data or PIXELS in data


def samples_in_memory(data, model, options: DrawOptions, tokenizer=None) -> CalibrationData:
    """Draw samples from what the caller holds.

    Items that can be read in any order are drawn at random; of a stream the first ones are taken.

    Args:
        data: see :func:`.load_calibration`.
        tokenizer: in place of the model's own; for images, a processor.

    Raises:
        OptionError: it is of no kind that is known.
        DataError: an item cannot be used (named).
    """
    given = _given(data, options.seed)
    takes_images = model.part.takes_images
    if hasattr(given.first, "convert"):  # an image of Pillow
        given = _wrapped(given, "image")
    elif is_chat(given.first):
        given = _wrapped(given, CHATS[0])
    first = given.first
    if _are_pixels(first):
        return _pixels(given, model, options)
    if isinstance(first, Mapping) and not is_batch(first) and (takes_images or _has_image(first, model)):
        draw = samples_of_images if takes_images else samples_of_examples
        rows = ((number, _as_row(item)) for number, item in given.drawn)
        return draw(given.name, StreamedRows(rows, "memory", given.draw), model, options, tokenizer)
    if takes_images:
        raise OptionError(
            f"the {model.part.name} component of {model.name} takes images, got {given.name}; give a folder of them"
        )
    if isinstance(first, Mapping) and PIXELS in first:
        return _sequences(given, model, options, _examples)
    if _are_ids(first):
        return _sequences(given, model, options, _rows)
    if isinstance(first, str | Mapping):
        return _texts(given, model if tokenizer is None else model.with_tokenizer(tokenizer), options)
    raise OptionError(f"calibration data is {KINDS}; got {given.name} of {type(first).__name__}")


def _given(data, seed: int) -> Given:
    name = type(data).__name__
    datasets = sys.modules.get("datasets")  # who has one of its objects has imported it
    if datasets and isinstance(data, datasets.Dataset | datasets.IterableDataset) and _format_of(data) in TABLES:
        data = data.with_format(None)
    if datasets and isinstance(data, datasets.IterableDataset):
        rows = data.shuffle(seed=seed % 2**63, buffer_size=BUFFER)
        return _stream(name, rows, f"stream, buffer of {BUFFER} rows")
    data = _of_tables(data)
    if isinstance(data, Mapping):
        data = [data]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, type | str | bytes):
        if (isinstance(data, Tensor) and not data.dim()) or not len(data):
            raise DataError(f"the calibration data is an empty {name}; give at least one sample")
        drawn = ((i, data[i]) for i in map(int, order_of(len(data), seed)))
        return Given(name, data[0], data, drawn, "rows in random order", False)
    if not isinstance(data, Iterable) or isinstance(data, type | str | bytes | set | frozenset):
        raise OptionError(f"calibration data is {KINDS}; got {name}")
    return _stream(name, data, "first rows")


def _format_of(data) -> str | None:
    """Return what the rows of a Dataset are given as; of an IterableDataset only a private name has it."""
    streamed = getattr(data, "_formatting", None)
    return data.format["type"] if hasattr(data, "format") else getattr(streamed, "format_type", None)


def _of_tables(data):
    """Return the rows of a table of pandas, polars or pyarrow, or the values of a column, as a list."""
    if hasattr(data, "iloc"):  # read by labels, not by places
        return data.to_dict("records") if hasattr(data, "columns") else data.tolist()
    for read in ("to_dicts", "to_pylist"):
        if hasattr(data, read):
            return getattr(data, read)()
    return data


def _stream(name: str, rows: Iterable, draw: str) -> Given:
    items = iter(rows)
    try:
        first = next(items)
    except StopIteration:
        raise DataError(f"the calibration data is an empty {name}; give at least one sample") from None
    return Given(name, first, (), enumerate(itertools.chain([first], items)), draw, True)


def _wrapped(given: Given, column: str) -> Given:
    """Return items as rows with one column."""
    in_order = ({column: item} for item in given.in_order)
    drawn = ((number, {column: item}) for number, item in given.drawn)
    return given._replace(first={column: given.first}, in_order=in_order, drawn=drawn)


def _has_image(row: Mapping, model) -> bool:
    return "image" in row and model.image_token is not None


def _are_ids(item) -> bool:
    if isinstance(item, Mapping):
        return IDS in item
    if isinstance(item, list | tuple) and item:
        return isinstance(item[0], Tensor | int)  # of a TensorDataset; ids as a tokenizer returns them
    return isinstance(item, Tensor) or (hasattr(item, "__array__") and not isinstance(item, str))  # one of NumPy's


def _are_pixels(item) -> bool:
    if isinstance(item, Mapping):
        return PIXELS in item and IDS not in item
    return isinstance(item, Tensor) and item.is_floating_point() and item.dim() in (3, 4)


def _texts(given: Given, model, options: DrawOptions) -> CalibrationData:
    column = options.text_column

    def document(number: int, item) -> str | Chat:
        return item if isinstance(item, str) else document_of(_as_row(item), column, f"{given.name}, row {number}")

    def read(name: str, _: int) -> Text | Pieces:
        drawn = (document(number, item) for number, item in given.drawn)
        if given.is_stream:
            return Pieces(drawn, "memory", given.draw)
        documents, characters = [], 0
        for number, item in enumerate(_of_column(given.in_order, column)):
            documents.append(document(number, item))
            characters += len(documents[-1])
            if characters > streaming.LARGE:
                return Pieces(drawn, "memory", "rows")
        if not any(isinstance(one, Chat) or one.strip() for one in documents):
            raise DataError(f"the calibration data, a {name}, holds no text; give texts")
        return Text(name, tuple(documents), "memory")

    found = samples_of_texts({given.name: 1.0}, model, options, read)
    used = column if column != "text" and not isinstance(given.first, str) else None
    return replace(found, text_column=used)


def _as_row(item) -> Any:
    return dict(item) if isinstance(item, Mapping) else item


def _of_column(rows: Any, column: str) -> Iterable:
    """Return the rows of a Dataset without the columns that are not read."""
    names = getattr(rows, "column_names", ())
    read = column_read(names, column) if names else column
    return rows.select_columns([read]) if read in names else rows


def _sequences(given: Given, model, options: DrawOptions, read) -> CalibrationData:
    """Draw sequences of token ids, or examples.

    Args:
        read: item and where it stands, for messages -> the sequences in it.
    """
    length = min(options.max_length, model.context_length)
    found = (one for number, item in given.drawn for one in read(item, f"{given.name}, row {number}"))
    rows = list(itertools.islice((_cut(one, length) for one in found if _tokens(one) > 1), options.wanted))
    if not rows:
        raise DataError(f"the calibration data, a {given.name}, has no sequence of at least 2 tokens; give longer ones")
    if len(rows) < options.wanted:
        log.info("%s has %s, not %d", given.name, plural(len(rows), "sequence"), options.wanted)
    fitted, sequences = fitted_of(len(rows), options.num_samples), [row for row in rows if isinstance(row, Tensor)]
    if len(sequences) == len(rows) and len({len(row) for row in sequences}) == 1:
        ids = torch.stack(sequences)
    else:
        ids = tuple(row if isinstance(row, Example) else Example.of({IDS: row[None]}) for row in rows)
    check_fits(ids, model)
    held_out, samples = ids[fitted:] if len(ids) > fitted else None, options.num_samples
    return CalibrationData(ids[:fitted], given.name, "memory", options.seed, held_out, given.draw, wanted=samples)


def _tokens(row: Tensor | Example) -> int:
    return row.tokens if isinstance(row, Example) else len(row)


def _cut(row: Tensor | Example, length: int) -> Tensor | Example:
    return row if isinstance(row, Example) else row[:length].contiguous()


def _rows(item, where: str) -> Iterator[Tensor]:
    """Yield the sequences ``(T,)`` of an item without their padding."""
    mask = None
    if isinstance(item, Mapping):
        _check_honoured(item, where)
        item, mask = item.get(IDS), item.get(MASK)
    elif isinstance(item, list | tuple) and item and not isinstance(item[0], int):
        item = item[0]
    rows = _tensors(item, IDS, where)
    masks = [None] * len(rows) if mask is None else _tensors(mask, MASK, where)
    if len(masks) != len(rows):
        raise DataError(f"{where}: {MASK} has {plural(len(masks), 'row')} and {IDS} {len(rows)}; give a mask for each")
    for row, keep in zip(rows, masks, strict=True):
        row = row if keep is None else _unpadded(row, keep, where)
        if len(row) and int(row.min()) < 0:
            raise DataError(f"{where}: {IDS} holds the negative token id {int(row.min())}; padding needs an {MASK}")
        yield row


def _unpadded(row: Tensor, keep: Tensor, where: str) -> Tensor:
    if keep.shape != row.shape:
        raise DataError(f"{where}: {MASK} has {len(keep)} entries for {len(row)} tokens; give one for each")
    places = keep.nonzero().flatten()
    if len(places) and int(places[-1] - places[0]) + 1 != len(places):
        raise DataError(f"{where}: {MASK} leaves out tokens between others; only padding at the ends can be left out")
    return row[places]


def _check_honoured(batch: Mapping, where: str) -> None:
    """Raise :class:`DataError` where a batch has inputs that a model would not be measured with."""
    for name in NOT_HONOURED:
        value = batch.get(name)
        if value is None or (
            name == "token_type_ids" and not any(int(row.any()) for row in _tensors(value, name, where))
        ):
            continue
        raise DataError(f"{where}: {name} cannot be honoured; give sequences one by one, with {IDS} and {MASK} alone")


def _tensors(value, name: str, where: str) -> list[Tensor]:
    """Return the rows ``(T,)`` int64 of ``(T,)`` or ``(B, T)``: of a tensor, an array, or lists."""
    rows = None
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        nested = isinstance(value, list | tuple) and value and not isinstance(value[0], int)
        rows = [torch.as_tensor(row) for row in value] if nested else torch.as_tensor(value)
        if isinstance(rows, Tensor):
            rows = [rows] if rows.dim() == 1 else list(rows) if rows.dim() == 2 else None
    if rows is None or not all(row.dim() == 1 for row in rows):
        shape = getattr(value, "shape", None)
        got = type(value).__name__ if shape is None else f"shape {list(shape)}"
        raise DataError(f"{where}: {name} must be whole numbers (T,) or (B, T), got {got}")
    for row in rows:
        if name != MASK and len(row) and (row.is_floating_point() or row.is_complex() or row.dtype is torch.bool):
            raise DataError(f"{where}: {name} must be whole numbers, got {row.dtype}")
    return [(row != 0 if name == MASK else row).detach().cpu().long() for row in rows]


def _examples(item, where: str) -> Iterator[Example]:
    """Yield the image-text example of a batch, as a processor makes it."""
    if not isinstance(item, Mapping) or IDS not in item:
        raise DataError(f"{where} has no {IDS}; every batch needs them")
    _check_honoured(item, where)
    rows = [*_rows(item, where)]
    if len(rows) != 1 or len(rows[0]) != sum(map(len, _tensors(item[IDS], IDS, where))):
        raise DataError(
            f"{where}: images and texts of several rows cannot be told apart; give batches of one, without padding"
        )
    yield Example.of(
        {name: value.cpu() for name, value in item.items() if isinstance(value, Tensor)} | {IDS: rows[0][None]}
    )


def _pixels(given: Given, model, options: DrawOptions) -> CalibrationData:
    """Draw images that are pixels already."""
    wanted = options.num_samples + held_out_images(options.num_samples)
    images = (image for number, item in given.drawn for image in _images_of(item, f"{given.name}, row {number}"))
    found = list(itertools.islice(images, wanted))
    if len({image.shape for image in found}) > 1:
        raise DataError(
            f"the calibration data, a {given.name}, has images of several sizes; give them as images, not pixels"
        )
    pixels = torch.stack(found)
    check_fits(pixels, model)
    fitted = fitted_of(len(pixels), options.num_samples, held_out_images)
    return images_as_data(pixels, fitted, model.part, options, given.name, "memory", given.draw)


def _images_of(item, where: str) -> list[Tensor]:
    """Return the images ``(C, H, W)`` of an item."""
    pixels = item.get(PIXELS) if isinstance(item, Mapping) else item
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.dim() not in (3, 4):
        got = f"{list(pixels.shape)} of {pixels.dtype}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise DataError(f"{where}: pixels must be floats (C, H, W) or (B, C, H, W), got {got}")
    return [image.detach().cpu() for image in (pixels if pixels.dim() == 4 else [pixels])]
