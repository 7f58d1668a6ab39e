"""The MLP through latents: local, or up and down together for ReLU."""

from ...architectures import BlockView
from ...linalg.joint_mlp import MLP, joint_mlp
from ..base import BlockResult
from ..result import put_projection
from .factor import Fit, local, prepare
from .layout import Slot, dense_projections, slots
from .storing import store


def decompose_mlp(method, view: BlockView, moments, ranks: dict[str, int], result: BlockResult) -> None:
    """Replace the projections of the MLP listed in ``ranks``."""
    dense, layout, spec = dense_projections(method, view), slots(method, view), view.mlp.spec
    fits = {}
    if "ud" in method.joint_forms(view) and {"up", "down"} <= ranks.keys():
        fits |= _joint(moments, ranks, layout, dense)
    for module in [m for m in ranks if m not in fits]:
        moment = moments["mlp_hidden" if module == "down" else "mlp_input"]
        given = prepare(method, moment, centred=method.bias_refit and dense[module].bias is not None)
        fits[module] = local(layout[module], dense[module], given, ranks[module])
    paths = {"up": spec.up, "gate": spec.gate, "down": spec.down}
    for module in ranks:
        put_projection(result, paths[module], store(layout[module], fits[module], dense[module].weight.dtype))
        result.reports[module] = fits[module].report


def _joint(moments, ranks: dict[str, int], layout: dict[str, Slot], dense) -> dict[str, Fit]:
    """App. H: alternation with auxiliary activations, on samples of the MLP's input."""
    up, down, method = dense["up"], dense["down"], layout["up"].method
    X = moments["mlp_samples"].rows.double().T  # (D, n)
    biases = [None if d.bias is None else d.bias.double() for d in (up, down)]
    mlp = MLP(up.weight.double(), biases[0], down.weight.double(), biases[1])
    fit = joint_mlp(mlp, X, ranks=(ranks["up"], ranks["down"]), rounds=method.rounds, ridge=method.ridge)
    report = {
        "form": "joint up-down",
        "relative_error": fit.relative_error,
        "local_relative_error": fit.local_relative_error,
        "loss_history": fit.loss_history,
    }
    factors = {"up": (fit.B_up, fit.A_up, fit.b_up), "down": (fit.B_down, fit.A_down, fit.b_down)}
    return {
        m: Fit(B, A, None if dense[m].bias is None else bias, {"rank": ranks[m], "of": layout[m].full} | report)
        for m, (B, A, bias) in factors.items()
    }
