"""The MLP through latents: local, or up and down together for ReLU."""

from ...architectures import BlockView
from ...linalg.joint_mlp import MLP, joint_mlp
from ..base import BlockResult
from ..result import put_projection
from .factor import latent_of, local, prepare


def decompose_mlp(
    method, view: BlockView, moments, ranks: dict[str, int], joint: set[str], result: BlockResult
) -> None:
    """Replace the projections of the MLP listed in ``ranks``."""
    spec, rising = view.mlp.spec, view.mlp.rising()
    paths = {"up": spec.up, "gate": spec.gate, "down": spec.down}
    if "ud" in joint and {"up", "down"} <= ranks.keys():
        _joint(method, view, moments, ranks, result)
        return
    for module in ("gate", "up", "down"):
        if module not in ranks:
            continue
        dense = view.mlp.down if module == "down" else rising[paths[module]]
        moment = moments["mlp_hidden" if module == "down" else "mlp_input"]
        given = prepare(method, moment, centred=method.bias_refit and dense.bias is not None)
        latent, report = local(method, dense, given, ranks[module])
        put_projection(result, paths[module], latent)
        result.reports[module] = report


def _joint(method, view: BlockView, moments, ranks: dict[str, int], result: BlockResult) -> None:
    """App. H: alternation with auxiliary activations, on samples of the MLP's input."""
    spec = view.mlp.spec
    up, down = view.mlp.rising()[spec.up], view.mlp.down
    X = moments["mlp_samples"].rows.double().T  # (D, n)
    biases = [None if dense.bias is None else dense.bias.double() for dense in (up, down)]
    mlp = MLP(up.weight.double(), biases[0], down.weight.double(), biases[1])
    fit = joint_mlp(mlp, X, ranks=(ranks["up"], ranks["down"]), rounds=method.rounds, ridge=method.ridge)
    parts = (
        ("up", spec.up, up, fit.B_up, fit.A_up, fit.b_up),
        ("down", spec.down, down, fit.B_down, fit.A_down, fit.b_down),
    )
    for module, path, dense, B, A, bias in parts:
        kept = None if dense.bias is None else bias.to(dense.weight.dtype)
        latent, condition = latent_of(method, B, A, kept, dense.weight.dtype)
        put_projection(result, path, latent)
        result.reports[module] = {
            "rank": ranks[module],
            "of": min(dense.weight.shape),
            "form": "joint up-down",
            "relative_error": fit.relative_error,
            "local_relative_error": fit.local_relative_error,
            "loss_history": fit.loss_history,
            "junction_condition": condition,
        }
