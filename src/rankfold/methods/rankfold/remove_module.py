"""A whole attention or MLP taken out. What is left is the mean of what it sent, where a bias can hold that.

Shape legend: D model width, H query heads, K key/value heads, N head dimension.
"""

from torch import Tensor

from ...architectures import BlockView, Dense
from ..base import BlockResult
from ..result import put_attention, put_projection


def without_attention(method, view: BlockView, moments) -> BlockResult:
    """An attention of no width."""
    attention, result = view.attention, BlockResult()
    projections = {name: _reading_nothing(dense) for name, dense in zip("qkv", attention.qkv(), strict=True)}
    projections["o"] = _of_nothing(attention.output, moments["attention_output"].mean, method)
    put_attention(result, attention, projections, 0, 0)
    for module in ("qk", "vo"):
        _report(result, module, attention.head_dim)
    return result


def without_mlp(method, view: BlockView, moments) -> BlockResult:
    """An MLP of no hidden units."""
    mlp, result = view.mlp, BlockResult()
    for path, projection in mlp.rising().items():
        put_projection(result, path, _reading_nothing(projection))
    put_projection(result, mlp.spec.down, _of_nothing(mlp.down, moments["mlp_hidden"].mean, method))
    _report(result, "mlp", mlp.hidden)
    return result


def _reading_nothing(dense: Dense) -> Dense:
    return Dense(dense.weight[:0], None if dense.bias is None else dense.bias[:0])


def _of_nothing(dense: Dense, mean: Tensor, method) -> Dense:
    """``(D, 0)``; the bias takes the mean, as it does where some dimensions stay."""
    bias = dense.bias
    if bias is not None and method.bias_refit:
        bias = (bias.double() + dense.weight.double() @ mean.double()).to(bias.dtype)
    return Dense(dense.weight[:, :0].contiguous(), bias)


def _report(result: BlockResult, module: str, full: int) -> None:
    result.reports[module] = {"rank": 0, "of": full, "relative_error": 1.0}
    result.errors[module] = lambda other: 1.0
