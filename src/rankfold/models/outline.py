"""A model that is only a config: shapes without a number."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from .._utils.reporting import asking_hub
from ..errors import UnsupportedModelError, option
from .dense_model import DenseModel
from .devices import DTYPES
from .given import DEQUANTISES, check_quantised
from .hub import repository_of
from .listing import CONFIG
from .opening import _empty
from .whole import read_config

log = logging.getLogger(__name__)


class Outline(DenseModel):
    """A dense model all of whose weights are on the meta device; whatever runs it would read them block by block.

    Attributes:
        memory_bytes: of the accelerator that it is planned for.
    """

    memory_bytes: int = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return the free and the whole memory of that accelerator, as PyTorch's modules of devices do."""
        return self.memory_bytes, self.memory_bytes

    @property
    def streamed(self) -> bool:
        return True


def open_outline(
    model: str | Path | PretrainedConfig, *, dtype: torch.dtype | None = None, revision: str | None = None
) -> Outline:
    """Build the shapes of a model from its config; no weight is read, and of a hub id only ``config.json``.

    Args:
        model: config, folder with a ``config.json``, the file itself, or a hub id.
        dtype: of the weights; ``None``: that of the config, or else bfloat16.
        revision: of a hub id.

    Raises:
        CheckpointError: there is no such config.
        UnsupportedModelError: its family is not known, or its weights are compressed or quantised already.
    """
    given = isinstance(model, PretrainedConfig)
    config, name = (copy.deepcopy(model), type(model).__name__) if given else _read(model, revision)
    _forget_quantiser(config, name)
    stored: Any = config.dtype
    written = dtype or (stored if stored in DTYPES.values() else torch.bfloat16)
    with torch.device("meta"):
        network = _empty(config, written)
    network.tie_weights()  # which making empty ones undoes
    outline = Outline(network, name, torch.device("meta"), written)
    if outline.architecture.derived:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no spec, and one read off its blocks is checked on weights, which a "
            f"config does not have; give the model, without {option('gpu')}"
        )
    return outline


def _read(model: str | Path, revision: str | None) -> tuple[PretrainedConfig, str]:
    path = Path(model).expanduser()
    if path.exists():
        folder = path.parent if path.name == CONFIG else path
        return read_config(folder), folder.resolve().name
    name, at = repository_of(str(model), revision)
    from huggingface_hub import hf_hub_download

    with asking_hub(name, f"cannot get the config of {name!r} from the hub", "check the name and the connection"):
        return read_config(Path(hf_hub_download(name, CONFIG, revision=at)).parent), name


def _forget_quantiser(config: Any, name: str) -> None:
    """Take the config of a model that is stored in fewer bits for that of the model it stands for."""
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and found.get("quant_method") in DEQUANTISES:
        log.warning("%s is stored as %s; this is of its de-quantised weights", name, found["quant_method"])
        del config.quantization_config
    check_quantised(config, name)
