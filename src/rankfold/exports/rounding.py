"""Round the blocks of a padded model one after another, each for the inputs that it gets behind the rounded ones."""

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
    """A stream of calibration text behind the blocks that are rounded so far.

    Args:
        form: the model that is written.
        outer: its tensors around the blocks, by name.
        tokens: calibration text.
        format: one of :data:`.gguf_blocks.FORMATS`.
    """

    def __init__(self, form: StockModel, outer: dict[str, Tensor], tokens: CalibrationData, format: str):
        self.form, self.format, self.model = form, format, form.empty(torch.float32)
        self.model.load_state_dict({name: tensor.float() for name, tensor in outer.items()}, strict=False, assign=True)
        self.model.tie_weights()
        source = DenseModel(self.model, "the export", torch.device("cpu"), torch.float32)
        self.stream = start(source, tokens.ids, autocast=source.autocast)

    @torch.no_grad()
    def __call__(self, index: int, state: dict[str, Tensor]) -> dict[str, tuple[Rounded, str]]:
        """Round what a block multiplies with, and go through it.

        Args:
            index: of the block; blocks come in their order.
            state: its tensors by name.

        Returns:
            Name of a matrix -> its codes and format; those whose rows are not whole blocks stay as they are.
        """
        view = self.form.view(self.model, index)
        view.module.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
        moments = measure(view, self.stream, INPUTS, step=False)
        found: dict[str, tuple[Rounded, str]] = {}
        readers = view.readers
        for statistic, paths in readers.items():
            weights = {path: view.module.get_parameter(f"{path}.weight") for path in paths}
            if any(weight.shape[1] % BLOCK for weight in weights.values()):
                continue
            given = rounding_order(moments[statistic].second_moment())
            for path, weight in weights.items():
                values = path == readers["attention_input"][-1]
                format = FORMATS[self.format].finer if values else self.format
                rounded = round_to_blocks(weight, given, levels=FORMATS[format].levels)
                weight.copy_(rounded.values())
                found[f"{path}.weight"] = rounded, format
        advance(view, self.stream)
        view.module.to("meta")
        return found
