"""Llama with an MLP of its own width in every block: DeciLM, as NVIDIA's Nemotron-NAS models are written."""

import dataclasses
from pathlib import Path

from .._utils.files import read_json, write_json, write_text
from ..architectures import BlockView
from ..compression.verify import Probe
from ..models.dense_model import DenseModel
from .folder import write_folder
from .form import StockModel, stock_form
from .reading import read_rising

CODE = "configuration_decilm"
SAME = {"no_op": False, "replace_with_linear": False}  # every block has both halves


def deci_form(source: DenseModel) -> StockModel:
    """The stock form, its MLPs as wide as they are.

    Raises:
        UnsupportedModelError: a block is made of something else than matrices.
    """
    form, layers = stock_form(source), {}
    empty = form.empty()
    for index in range(len(source)):
        layers |= _narrower(source.block(index), form.view(empty, index))
    return dataclasses.replace(form, layers=layers)


def _narrower(view: BlockView, stock: BlockView) -> dict[str, dict]:
    """Descriptions of the layers of an MLP, where it is narrower than the stock one."""
    rising, down = read_rising(view)
    units, width = max(down.weight.shape[1], 1), down.weight.shape[0]  # one of zeros where all are gone
    sizes = dict.fromkeys(rising, (width, units)) | {view.mlp.spec.down: (units, width)}
    if units == stock.mlp.hidden:
        return {}
    biased = {path: stock.module.get_submodule(path).bias is not None for path in sizes}
    return {
        f"{view.path}.{path}": {"kind": "linear", "in": into, "out": out, "bias": biased[path]}
        for path, (into, out) in sizes.items()
    }


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
