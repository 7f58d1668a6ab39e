"""Type I in a block: slice up and gate, refit down."""

from ...architectures import BlockView, Dense
from ...linalg.nystrom import nystrom
from ..base import BlockResult
from ..result import put_projection


def decompose_mlp(method, view: BlockView, moments, rank: int, result: BlockResult) -> None:
    """Algorithm 1; with a bias on the down projection, on the covariance, the mean moved into the bias."""
    mlp = view.mlp
    full = mlp.hidden
    if rank == full:
        result.reports["mlp"] = {"rank": full, "of": full, "relative_error": 0.0}
        return
    down, moment = mlp.down, moments["mlp_hidden"]
    refit = method.bias_refit and down.bias is not None
    C = moment.covariance if refit else moment.C
    mean = moment.mean
    del moment
    moments.pop("mlp_hidden")  # the largest of all; nothing else needs it
    fit = nystrom(down.weight, C, rank=rank, ridge=method.ridge, overwrite=True)
    bias = down.bias
    if refit:
        shift = down.weight.double() @ mean - fit.W_down.double() @ mean[fit.keep]
        bias = (bias.double() + shift).to(bias.dtype)
    for path, projection in mlp.rising().items():
        put_projection(result, path, projection.rows(mlp.rows_of(fit.keep)))
    put_projection(result, mlp.spec.down, Dense(fit.W_down, bias))
    result.reports["mlp"] = {
        "rank": rank,
        "of": full,
        "relative_error": fit.relative_error,
        "error": fit.error,
        "theorem_1": fit.bounds.theorem,
        "proposition_1": fit.bounds.proposition,
        "epsilon": fit.bounds.epsilon,
        "clamped": fit.clamped,
    }
