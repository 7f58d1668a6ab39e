"""The MLP through latents: local, or up and down together for ReLU."""

from dataclasses import replace
from typing import Any

from ..._utils.memory import release_memory
from ...architectures import BlockView, Dense
from ...calibration.moments import BlockMoments
from ...linalg.joint_mlp import joint_mlp, mlp_error, varies
from ..base import BlockResult
from ..result import put_projection
from .factor import Fit, inputs_of, local, product
from .layout import Slot, column_weights, dense_projections, slots
from .measures import MLPError, mlp_of
from .report import Report
from .storing import store_all

HELD_OUT = 8  # one of so many rows is not fitted


def decompose_mlp(method, view: BlockView, moments: BlockMoments, ranks: dict[str, int]) -> BlockResult:
    """The projections of the MLP listed in ``ranks``, latent: fit, junction, store."""
    dense, layout = dense_projections(method, view), slots(method, view)
    weights = column_weights(method, view, moments)
    result = BlockResult()
    for modules in _together(method, view, ranks):
        given = inputs_of(method, moments, weights)
        fits = {m: local(layout[m], dense[m], given(m, method.refits_bias(dense[m])), ranks[m]) for m in modules}
        del given  # it keeps what it has prepared
        if len(modules) > 1 and "down" in modules:
            fits = _joint(method, moments, fits, layout, dense)
        latents, reports, errors = store_all(layout, fits, dense, moments)
        for module in modules:
            put_projection(result, view.mlp.paths[module], latents[module])
            result.reports[module] = reports[module].to_dict()
        result.errors.update(errors)
        del fits
        release_memory()  # one moment of the hidden units is the most there should be beside the block
    return result


def _together(method, view: BlockView, ranks: dict[str, int]) -> list[list[str]]:
    """Modules fitted at the same time: to one input, or jointly; one after another, to hold one moment at a time."""
    if "ud" in method.joint_forms(view) and {"up", "down"} <= ranks.keys():
        return [list(ranks)]
    rising = [m for m in ranks if m != "down"]
    return [group for group in (rising, [m for m in ranks if m == "down"]) if group]


def _joint(method, moments, local: dict[str, Fit], layout: dict[str, Slot], dense: dict[str, Dense]) -> dict[str, Fit]:
    """App. H: alternation with auxiliary activations, on rows of the MLP's input; the local form where that is better.

    The last rows are not fitted: with few rows for each hidden unit the joint form interpolates, and the error on the
    rows it was fitted to does not show it.
    """
    X = moments["mlp_samples"].rows.T  # (D, n)
    known = X.shape[1] - max(1, X.shape[1] // HELD_OUT)
    mlp = mlp_of(dense["up"], dense["down"])
    exact = mlp._replace(W_up=mlp.W_up.double(), W_down=mlp.W_down.double())  # so that the factors stay unrounded
    if not varies(exact, X[:, :known]):
        form = "local (the MLP's output does not vary)"
        return {m: f._replace(report=replace(f.report, form=form)) for m, f in local.items()}
    ranks = local["up"].report.rank, local["down"].report.rank
    found = joint_mlp(exact, X[:, :known], ranks=ranks, rounds=method.rounds, ridge=method.ridge)
    factors = {"up": (found.B_up, found.A_up, found.b_up), "down": (found.B_down, found.A_down, found.b_down)}
    measure = MLPError(dense["up"], dense["down"])
    common: dict[str, Any] = {"form": "joint up-down", "training_error": found.relative_error, "relative_error": 0.0}
    joint = {}
    for m, (B, A, bias) in factors.items():
        report = Report(rank=local[m].report.rank, of=layout[m].full, loss_history=tuple(found.loss_history), **common)
        joint[m] = Fit(B, A, None if dense[m].bias is None else bias, report, measure)
        if target := local[m].target:  # refined under rounding: its own fit, for the inputs of the dense model
            weight = product(joint[m]).weight
            joint[m] = joint[m]._replace(mean=local[m].mean, target=target._replace(weight=weight))
    held_out = {
        name: mlp_error(mlp, mlp_of(product(fits["up"]), product(fits["down"])), X[:, known:])
        for name, fits in (("joint", joint), ("local", local))
    }
    if held_out["joint"] > held_out["local"]:
        form = "local (joint up-down was worse held out)"
        return {m: f._replace(report=replace(f.report, form=form, form_errors=held_out)) for m, f in local.items()}
    error = measure({m: product(fit) for m, fit in joint.items()}, moments)
    facts = {"relative_error": error, "form_errors": held_out}
    return {m: fit._replace(report=replace(fit.report, **facts)) for m, fit in joint.items()}
