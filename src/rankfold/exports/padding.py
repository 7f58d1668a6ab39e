"""The tensors of a stock block that computes what a smaller one computes: zeros stand where nothing is left.

Shape legend: D model width, H query heads, K key/value heads, G = H / K, N head width of the stock block, R query-key
width, V value width, F hidden units.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import AttentionView, BlockView, Dense, ExpertsView, MLPView
from ..errors import UnsupportedModelError, option
from ..linalg.padding import pad_units, scatter_heads
from ..models.weights import as_written
from .reading import AttentionWeights, read_heads, read_rising


def padded_state(
    view: BlockView, stock: BlockView, dtype: torch.dtype, moved: Tensor | None = None
) -> dict[str, Tensor]:
    """Tensors of a stock block by name, in the dtype that is written.

    Args:
        view: the block to be written in another form.
        stock: the block of its family that it fits into; its tensors are not read.
        moved: see :attr:`rankfold.exports.form.StockModel.places`.

    Raises:
        UnsupportedModelError: it has something that the stock block has no place for.
    """
    attention = stock.attention
    layers = {} if attention.spec.unsupported_reason else _padded_attention(view, attention, moved)
    if stock.mlp:
        layers |= _padded_mlp(view, stock.mlp)
    state = _padded_experts(view.experts, stock.experts) if stock.experts else {}
    for path, layer in layers.items():
        state |= _stored(f"{view.path}.{path}", path, layer, stock.module.get_submodule(path))
    for name, tensor in stock.module.state_dict().items():
        if name not in state:
            state[name] = _as_it_is(view, attention, name, tensor)
    return {name: as_written(name, tensor, dtype) for name, tensor in state.items()}


def _padded_attention(view: BlockView, stock: AttentionView, moved: Tensor | None) -> dict[str, Dense]:
    heads = read_heads(view, stock.rotary_dim if moved is None else len(moved))
    if moved is not None:
        heads = dataclasses.replace(heads, places=moved[heads.places])
    *qkv, o = _padded_heads(heads, stock)
    layers = dict(zip(stock.spec.qkv, _fused(stock, qkv), strict=True)) | {stock.spec.output: o}
    return {f"{stock.spec.path}.{path}": layer for path, layer in layers.items()}


def _padded_heads(heads: AttentionWeights, stock: AttentionView) -> list[Dense]:
    """q ``(H N, D)``, k and v ``(K N, D)``, o ``(D, H N)`` with the stock's number of heads and softmax scale."""
    N, G = stock.head_dim, heads.heads // heads.kv_heads
    values = torch.arange(heads.values).repeat(heads.kv_heads, 1)
    folded = heads.scaling / stock.runtime()["scaling"]  # the stock model divides by the root of its own width

    def placed(rows: Dense, places: Tensor, groups: int, count: int) -> Dense:
        places = places.repeat_interleave(groups, 0)
        return _each(rows, lambda t: pad_units(scatter_heads(t, places, N), count * N))

    q = placed(_each(heads.q, lambda t: t * folded), heads.places, G, stock.heads)
    k, v = placed(heads.k, heads.places, 1, stock.kv_heads), placed(heads.v, values, 1, stock.kv_heads)
    o = placed(Dense(heads.o.weight.T, None), values, G, stock.heads).weight
    return [q, k, v, Dense(o.T, heads.o.bias)]


def _each(layer: Dense, change: Callable[[Tensor], Tensor]) -> Dense:
    """Change the weight, and the bias where there is one."""
    return Dense(change(layer.weight), None if layer.bias is None else change(layer.bias))


def _fused(stock: AttentionView, qkv: list[Dense]) -> list[Dense]:
    """As the stock stores them; in one matrix either all have a bias or none has."""
    if len(stock.spec.qkv) == 1 and any(part.bias is not None for part in qkv):
        qkv = [Dense(p.weight, p.weight.new_zeros(len(p.weight)) if p.bias is None else p.bias) for p in qkv]
    return stock.fused(*qkv)


def _padded_mlp(view: BlockView, stock: MLPView) -> dict[str, Dense]:
    rising, down = read_rising(view)
    parts = 2 if stock.spec.fused_gate else 1

    def wide(t: Tensor) -> Tensor:
        return pad_units(t.unflatten(0, (parts, -1)), stock.hidden, 1).flatten(0, 1)

    layers = {path: _each(layer, wide) for path, layer in rising.items()}
    return layers | {stock.spec.down: Dense(pad_units(down.weight, stock.hidden, 1), down.bias)}


def _padded_experts(experts: ExpertsView, stock: ExpertsView) -> dict[str, Tensor]:
    rows, full = stock.rows_of(torch.arange(experts.hidden)), len(stock.rising(0).weight)

    def one(expert: int) -> tuple[Dense, Dense]:
        rising, down = experts.rising(expert), experts.down(expert)
        wide = _each(rising, lambda t: t.new_zeros(full, *t.shape[1:]).index_copy(0, rows, t))
        return wide, Dense(pad_units(down.weight, stock.hidden, 1), down.bias)

    tensors = stock.stacked([one(expert) for expert in range(experts.count)])
    return {f"{stock.spec.path}.{name}": tensor for name, tensor in tensors.items()}


def _stored(where: str, path: str, layer: Dense, module: Any) -> dict[str, Tensor]:
    """Tensors of a layer as the class of ``module`` keeps them."""
    weight = layer.weight if isinstance(module, nn.Linear) else layer.weight.T
    if module.bias is None:
        if layer.bias is not None and layer.bias.count_nonzero():
            raise UnsupportedModelError(
                f"{where} has a bias, and the stock class has no place for one; serve the folder as it is "
                f"(docs/serve.md), or compress with a method that adds none, such as {option('method', 'rankfold')}"
            )
        return {f"{path}.weight": weight}
    bias = weight.new_zeros(module.bias.shape) if layer.bias is None else layer.bias
    return {f"{path}.weight": weight, f"{path}.bias": bias}


def _as_it_is(view: BlockView, stock: AttentionView, name: str, like: Tensor) -> Tensor:
    """A tensor that no method changes: norms, routers; a compressed attention renames the norms that it adopted."""
    state, found = view.module.state_dict(), name
    for ours, theirs in zip(("q_norm", "k_norm"), stock.norms or (), strict=bool(stock.norms)):
        path = f"{stock.spec.path}.{theirs}."
        if name not in state and name.startswith(path):
            found = f"{stock.spec.path}.{ours}.{name.removeprefix(path)}"
    if found not in state or state[found].shape != like.shape:
        raise UnsupportedModelError(
            f"{view.path} has no {name} of shape {list(like.shape)}, which its stock class wants; serve the folder as "
            "it is (docs/serve.md)"
        )
    return state[found]
