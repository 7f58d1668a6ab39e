"""What an export keeps of the saving of a compression, said before anything is exported."""

from pathlib import Path
from typing import Any

import torch

from ..architectures import BlockView
from ..checkpoint.load import described, empty_model
from ..errors import UnsupportedModelError
from ..models.dense_model import DenseModel
from ..models.weights import Weights
from ..models.whole import read_config
from .form import parameters, stock_form

PAIRS = ".rotary_pairs"  # buffers that say which frequencies a narrow head turns by: all that is read


class _Shapes(DenseModel):
    """A compressed checkpoint without its weights."""

    def block(self, index: int) -> BlockView:
        return self.meta_block(index)


def stock_parameters(folder: Path) -> int | None:
    """Return how many parameters a compressed checkpoint has as a stock model, padded as `export` pads it; no weight is
    read.

    Returns:
        ``None`` where it is a stock model already, is no decoder, or no stock model can express it.
    """
    config: Any = read_config(folder)
    if described(config) is None:
        return None
    model, weights = empty_model(config), Weights(folder)
    pairs = [name for name, _ in model.named_buffers() if name.endswith(PAIRS)]
    model.load_state_dict({name: weights.raw(name) for name in pairs}, strict=False, assign=True)
    try:
        source = _Shapes(model, folder.name, torch.device("cpu"), config.dtype)
        return parameters(stock_form(source).empty()) if source.architecture.decoder else None
    except UnsupportedModelError:
        return None
