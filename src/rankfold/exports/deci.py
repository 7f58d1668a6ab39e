"""Llama with an MLP of its own width in every block: DeciLM, as NVIDIA's Nemotron-NAS models are written."""

import dataclasses
from pathlib import Path

from .._utils.files import read_json, write_json, write_text
from .._utils.present import present
from ..architectures import BlockView
from ..compression.verify import Probe
from ..models.dense_model import DenseModel
from .folder import write_folder
from .form import StockModel, plain, stock_form
from .reading import read_rising

CODE = "configuration_decilm"
SAME = {"no_op": False, "replace_with_linear": False}  # every block has both halves


def deci_form(source: DenseModel) -> StockModel:
    """The stock form, its MLPs as wide as they are.

    Raises:
        UnsupportedModelError: a block is made of something else than matrices.
    """
    widths = [read_rising(source.block(index))[1].weight.shape[1] for index in range(len(source))]
    return _with_widths(stock_form(source), widths)


def narrowed_form(source: DenseModel, widths: list[int]) -> StockModel:
    """The form of a dense model of a stock class when the MLPs of its blocks will have these widths."""
    config = plain(source.model.config)
    setattr(config, present(source.meta_block(0).mlp.spec.width), max(1, *widths))
    return _with_widths(StockModel(config, source.architecture, {}), widths)


def _with_widths(form: StockModel, widths: list[int]) -> StockModel:
    """A form with descriptions of the layers of MLPs that are narrower than its config says."""
    empty, layers = form.empty(), {}
    for index, units in enumerate(widths):
        layers |= _narrower(form.view(empty, index), max(units, 1))  # one of zeros where all are gone
    return dataclasses.replace(form, layers=layers)


def _narrower(stock: BlockView, units: int) -> dict[str, dict]:
    if units == stock.mlp.hidden:
        return {}
    spec, found = stock.mlp.spec, {}
    for path in spec.paths.values():
        layer = stock.module.get_submodule(path)
        into, out = (units, stock.width) if path == spec.down else (stock.width, units)
        biased = layer.bias is not None
        found[f"{stock.path}.{path}"] = {"kind": "linear", "in": into, "out": out, "bias": biased}
    return found


def write_deci(source: DenseModel, form: StockModel, folder: Path, probe: Probe) -> float:
    """Write a folder that vLLM reads as ``DeciLMForCausalLM``, and read its tensors back; see
    :func:`~.folder.write_folder`.

    There is no such class in transformers. What is run is a Llama with those widths, so ``config.json`` itself is not.
    """
    difference = write_folder(source, form, folder, probe)
    empty = form.empty()
    changed = {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{CODE}.DeciLMConfig"},
        "block_configs": [_block_config(form.view(empty, index)) for index in range(len(source))],
    }
    write_json(folder / "config.json", read_json(folder / "config.json") | changed)
    write_text(folder / f"{CODE}.py", Path(__file__).with_name(f"{CODE}.py").read_text(encoding="utf-8"))
    return difference


def _block_config(view: BlockView) -> dict:
    groups = view.attention.heads // view.attention.kv_heads
    return {
        "attention": {**SAME, "n_heads_in_group": groups},
        "ffn": {**SAME, "intermediate_size": view.mlp.hidden, "hidden_act": view.config.hidden_act},
    }
