"""Round the blocks of a padded model one after another, each for the inputs that it gets from the rounded ones."""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from ..calibration.runner import advance, measure, start
from ..data.calibration_data import CalibrationData
from ..linalg.block_rounding import BLOCK, Rounded, round_to_blocks, rounding_order
from ..models.dense_model import DenseModel
from .form import StockModel
from .gguf_blocks import FORMATS

INPUTS = {"attention_input", "attention_output", "mlp_input", "mlp_hidden"}


class BlockRounding:
    """A stream of calibration text after the blocks that are rounded so far.

    Args:
        form: the model that is written.
        outer: its tensors around the blocks, by name.
        tokens: calibration text.
        kind_of: see :meth:`.gguf_layout.Layout.kind_of`.
    """

    def __init__(
        self, form: StockModel, outer: dict[str, Tensor], tokens: CalibrationData, kind_of: Callable[..., Enum]
    ):
        self.form, self.kind_of, self.model = form, kind_of, form.empty(torch.float32)
        self.model.load_state_dict({name: tensor.float() for name, tensor in outer.items()}, strict=False, assign=True)
        self.model.tie_weights()
        source = DenseModel(self.model, "the export", torch.device("cpu"), torch.float32)
        self.stream = start(source, tokens.ids, autocast=source.autocast)

    @torch.no_grad()
    def __call__(self, index: int, state: dict[str, Tensor]) -> dict[str, Rounded]:
        """Round what a block multiplies with, and go through it.

        Args:
            index: of the block; blocks come in their order.
            state: its tensors by name.

        Returns:
            Name of a matrix -> its codes; those whose rows are not whole blocks stay as they are.
        """
        view = self.form.view(self.model, index)
        view.module.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
        moments = measure(view, self.stream, INPUTS, step=False)
        found: dict[str, Rounded] = {}
        for statistic, paths in view.readers.items():
            weights = {path: view.module.get_parameter(f"{path}.weight") for path in paths}
            if any(weight.shape[1] % BLOCK for weight in weights.values()):
                continue
            given = rounding_order(moments[statistic].second_moment())
            for path, weight in weights.items():
                kind = self.kind_of(f"{view.path}.{path}.weight", weight.shape)
                rounded = round_to_blocks(weight, given, levels=FORMATS[kind.name.lower()].levels)
                weight.copy_(rounded.values())
                found[f"{path}.weight"] = rounded
        advance(view, self.stream)
        view.module.to("meta")
        return found
