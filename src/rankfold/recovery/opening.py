"""Open what a recovery needs: the compressed model, the dense one, and the texts."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._utils.hub_id import is_hub_id
from ..checkpoint.load import load_model
from ..checkpoint.streamed import open_streamed
from ..compression.result import CompressionResult
from ..data.calibration_data import CalibrationData, shown
from ..data.load import load_undivided, named
from ..data.mixing import DrawOptions, expanded
from ..data.probes import Probes, load_probes
from ..errors import CheckpointError, DataError, OptionError, option
from ..models.auto_classes import check_writes
from ..models.dense_model import DenseModel
from ..models.devices import is_on
from ..models.fingerprint import fingerprint
from ..models.given import check_plain, resolve_model
from ..models.opening import open_model, stored_dtype
from ..models.tokenizer import TokenizerFiles
from ..models.whole import read_config
from ..report.record import NAME, read_record
from .options import Options

log = logging.getLogger(__name__)

Compressed = str | Path | PreTrainedModel | CompressionResult
Teacher = str | Path | PreTrainedModel | DenseModel


@dataclass(frozen=True)
class Student:
    """A compressed model that is to be trained."""

    model: Any  # in fp32; a DenseModel where blocks are read one at a time
    record: dict
    folder: Path | None
    written: torch.dtype

    @property
    def fingerprint(self) -> str:
        """Digest of the weights as they are now."""
        if isinstance(self.model, DenseModel):
            return self.model.fingerprint
        return fingerprint({}, sorted(self.model.state_dict().items()))

    @property
    def network(self) -> PreTrainedModel:
        """The transformers model; without the weights of its blocks where these are read one at a time."""
        return self.model.model if isinstance(self.model, DenseModel) else self.model


def open_student(model: Compressed, device: str) -> Student:
    """Load a model to train in fp32."""
    known = {}
    if isinstance(model, CompressionResult):
        model, known = model.output or model.model, model.record
    if isinstance(model, PreTrainedModel):
        check_plain(model)
        return Student(copy.deepcopy(model).float(), dict(known), None, model.dtype)
    folder, record, written = _read(model)
    return Student(load_model(folder, dtype="float32", device=device), record, folder, written)


def open_student_streamed(model: Compressed, device: str) -> Student:
    """Open a model to train in fp32, one block at a time."""
    place = model.output if isinstance(model, CompressionResult) else model
    if place is None or isinstance(place, PreTrainedModel):
        raise OptionError(
            f"{option('blockwise', True)} reads one block at a time, and the model is in memory; write it to a folder, "
            f"or leave {option('blockwise')} out"
        )
    folder, record, written = _read(place)
    return Student(open_streamed(folder, dtype="float32", device=device), record, folder, written)


def _read(model: str | Path) -> tuple[Path, dict, torch.dtype]:
    """Return the folder of a model, its record, and the dtype it is stored in."""
    folder, weights = resolve_model(model)
    record = read_record(folder) if (folder / NAME).exists() else {}
    return folder, record, stored_dtype(read_config(folder), weights) if weights else torch.float32


def opened_before(teacher: Teacher | None, model: Compressed) -> Teacher | None:
    """Return the dense model that is named, else the one that ``compress`` had; ``None``: that of the record."""
    return teacher or (model.dense if isinstance(model, CompressionResult) else None)


def device_beside(teacher: Teacher | None, device: str) -> str:
    """Return where to train: where a dense model in memory is, if no device is named."""
    model = teacher.model if isinstance(teacher, DenseModel) else teacher
    return str(model.device) if device == "auto" and isinstance(model, PreTrainedModel) else device


def open_teacher(teacher: Teacher | None, given: Student) -> DenseModel:
    """Open the dense model, next to the compressed one.

    Args:
        teacher: see :func:`opened_before`.

    Raises:
        OptionError: nothing says which it is, it has another vocabulary than the compressed model, or it is in memory
            on another device.
        UnsupportedModelError: it is an encoder.
    """
    teacher, here = teacher or _recorded_teacher(given.record), given.network.device
    source = teacher if isinstance(teacher, DenseModel) else open_model(teacher, device=str(here))
    check_writes(source.model.config, source.name)
    if not is_on(next(source.model.parameters()), here):
        raise OptionError(
            f"the dense model is on {source.model.device} and the compressed one on {here}; move one of them"
        )
    if source.config.vocab_size != (size := given.network.config.get_text_config().vocab_size):
        raise OptionError(
            f"the teacher has {source.config.vocab_size:,} tokens and the model {size:,}; give the dense model that it "
            "was compressed from"
        )
    if given.folder is not None:
        _check_tokens(source, TokenizerFiles.beside(given.folder))
    return source


def _check_tokens(source: DenseModel, files: TokenizerFiles) -> None:
    """Raise :class:`OptionError` where most ids are other tokens to the dense model than to the compressed one.

    A few may be: a ``.gguf`` file and a fine-tuned model have other names for special ones.
    """
    if not (source.processors.has_tokenizer and files.exist):
        return
    theirs, ours = (
        {number: token for token, number in x.get_vocab().items()} for x in (source.tokenizer, files.load())
    )
    other = [number for number in sorted(theirs.keys() & ours) if theirs[number] != ours[number]]
    if 2 * len(other) > len(ours):
        example = other[len(other) // 2]
        raise OptionError(
            f"the teacher has another tokenizer than the model: token {example:,} is {theirs[example]!r} there and "
            f"{ours[example]!r} here; give the dense model that it was compressed from, or one with the same tokenizer"
        )


def _recorded_teacher(record: dict) -> str:
    if not is_hub_id(record.get("base_model", "")):  # the name of a folder, which may be anywhere
        raise OptionError(
            f"the dense model {record['base_model']!r} was a local one; give its path as {option('teacher')}"
            if "base_model" in record
            else f"the model has no record of what it was compressed from; give the dense model as {option('teacher')}"
        )
    return f"{record['base_model']}@{record['revision']}" if "revision" in record else record["base_model"]


def load_texts(calibration, source: DenseModel, options: Options, sequences: float) -> dict[str, CalibrationData]:
    """Return name -> sequences to train on, and held-out ones.

    Args:
        calibration: as for :func:`rankfold.load_calibration`.
        sequences: to train on, of all texts together; each gives its share.

    Raises:
        OptionError: two texts have one name, one has a single sequence, or sequences differ in length.
    """
    found, shares = {}, named(calibration)
    for data, share in expanded(shares).items() if shares else [(calibration, 1.0)]:
        samples = max(1, round(sequences * share))
        drawn = DrawOptions(samples, options.length, options.seed, options.text_column)
        text = data if isinstance(data, CalibrationData) else load_undivided(data, source, drawn)
        name = shown(text.name)
        if name in found:
            raise OptionError(f"two texts are called {name!r}; rename one")
        if text.kind is not None:
            raise OptionError(f"training takes sequences of one length, and {name!r} holds {text.kind}; give texts")
        if text.held_out is None:
            raise OptionError(
                f"text {name!r} has a single sequence, so none can be held out; give more text or a smaller "
                f"{option('max_length')}"
            )
        found[name] = text
    return found


def probes_of(source: DenseModel, record: dict) -> Probes | None:
    """Return the probe texts, to be measured again; ``None`` where the record has none, or they cannot be read now."""
    if "kinds" not in (record.get("probe_texts") or {}):
        return None
    try:
        return load_probes(source)
    except (CheckpointError, DataError) as error:
        log.info("probe texts are not measured again: %s", error)
        return None
