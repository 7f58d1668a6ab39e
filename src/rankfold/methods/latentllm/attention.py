"""Attention through latents: local, joint query-key, joint value-output, one latent for queries, keys and values.

Shape legend: H query heads, K key/value heads, N head dimension, D model width.
"""

from dataclasses import replace
from typing import Any

import torch

from ..._utils.present import present
from ...architectures import BlockView, Dense
from ...calibration.moments import BlockMoments
from ...linalg.joint_qk import Affine, JointQK, choose_ranks, joint_qk
from ...linalg.joint_vo import attention_aware_output, joint_vo, vo_bias
from ...linalg.junction import head_block_identity
from ...linalg.pair_tucker import across
from ...linalg.pair_tucker import moments as head_moments
from ...linalg.rotations import rope_rotations
from ..base import BlockResult
from ..result import put_attention
from .factor import Fit, Input, RoundingTarget, inputs_of, local, product
from .layout import QKV, Slot, column_weights, dense_projections, slots
from .measures import AttendedError, HeadError, InHeads, Measure, ScoreError, of_heads, on_heads
from .report import Report
from .storing import in_junction, store_all

ATTENTION = ("q", "k", "v", QKV, "o")
PARTNERS = {"k": "q", "v": "o"}  # what takes up the other factor of an identity in every head


def decompose_attention(method, view: BlockView, moments: BlockMoments, ranks: dict[str, int]) -> BlockResult:
    """The attention module with the projections listed in ``ranks`` latent: fit, junction, store."""
    dense = {m: d for m, d in dense_projections(method, view).items() if m in ATTENTION}
    layout = slots(method, view)
    fits = _fits(method, view, moments, ranks, layout, dense)
    kept, parts = dict(dense), {}
    for module in [m for m in ("k", "v") if m in fits and layout[m].head_identity]:
        fits, kept, parts[module] = _head_junction(view, layout[module], fits, kept)
    latents, reports, errors = store_all(layout, fits, dense, moments, parts=parts)
    if QKV in dense and QKV not in fits:  # only the output projection loses weights
        kept = dict(zip("qkv", view.attention.qkv(), strict=True))
    chosen = {module: report.rank for module, report in reports.items()}
    result = BlockResult(reports={m: reports[m].to_dict() for m in ranks}, errors=errors)
    width, cached = view.attention.head_dim, method.cached_latents(view, chosen)
    put_attention(result, view.attention, kept | latents, width, width, None, cached)
    return result


def _fits(method, view: BlockView, moments, ranks, layout: dict[str, Slot], dense: dict[str, Dense]) -> dict[str, Fit]:
    """Unrounded factors of every module: joint where the method says so, local otherwise."""
    joint, fits, given = method.joint_forms(view), {}, inputs_of(method, moments, column_weights(method, view, moments))
    centred = {m: method.refits_bias(projection) for m, projection in dense.items()}
    if "qk" in joint and {"q", "k"} <= ranks.keys():
        fits |= _joint_qk(view, given("q", centred["q"]), moments, ranks, layout, dense)
    if "vo" in joint and {"v", "o"} <= ranks.keys():
        passes = centred["o"] and view.attention.averages  # then the output's bias takes the mean, else that of values
        fits |= _joint_vo(view, given("v", passes or centred["v"]), moments, ranks, layout, dense, passes)
    return fits | {m: local(layout[m], dense[m], given(m, centred[m]), ranks[m]) for m in ranks if m not in fits}


def _heads(dense: Dense, heads: int):
    weight = dense.weight.double().unflatten(0, (heads, -1))
    return weight, None if dense.bias is None else dense.bias.double().unflatten(0, (heads, -1))


def _joint_qk(view: BlockView, given: Input, moments, ranks, layout: dict[str, Slot], dense) -> dict[str, Fit]:
    """Algorithm 1: shared latents of queries and keys with the smallest error of the scores."""
    attention, method = view.attention, layout["q"].method
    (W_q, b_q), (W_k, b_k) = _heads(dense["q"], attention.heads), _heads(dense["k"], attention.kv_heads)
    options, form = dict[str, Any](), "joint qk"
    if given.centred:
        options["affine"] = Affine(given.mean, present(b_q), b_k if b_k is not None else torch.zeros_like(W_k[..., 0]))
    if attention.rotary_dim and method.window:
        options["rotations"] = rope_rotations(
            present(view.inv_freq).double(), attention.head_dim, window=method.window, causal=attention.causal
        )
        form += f", window {method.window}"
    facts: dict[str, dict[str, Any]] = {m: {} for m in "qk"}
    pair = (ranks["q"], ranks["k"])

    def fitted(pair: tuple[int, int]) -> JointQK:
        return joint_qk(W_q, W_k, given.precond, ranks=pair, alternations=method.alternations, **options)

    fit = fitted(pair)
    if method.qk_ranks == "spectra":
        planned = {m: layout[m].numbers(r) for m, r in zip("qk", pair, strict=True)}
        facts = {m: {"planned_rank": ranks[m], "planned_weights": planned[m]} for m in "qk"}
        budget = sum(planned.values())
        other = choose_ranks(W_q, W_k, given.precond, budget=budget, multiple=method.rank_multiple, **options)
        # They have the least bound of the error, and seldom more of it than those of the plan.
        if other != pair and (better := fitted(other)).relative_error < fit.relative_error:
            fit, pair = better, other
        facts = {m: facts[m] | {"weights": layout[m].numbers(r)} for m, r in zip("qk", pair, strict=True)}
    factors = {
        "q": (fit.B_q.flatten(0, 1), fit.A_q, (fit.b_q if given.centred else b_q)),
        "k": (fit.B_k.flatten(0, 1), fit.A_k, (fit.b_k if given.centred else b_k)),
    }
    factors = {m: (B, A, None if dense[m].bias is None else present(b).flatten()) for m, (B, A, b) in factors.items()}
    measure = ScoreError(dense["q"], dense["k"], attention.head_dim, given.centred, options.get("rotations"))
    common: dict[str, Any] = {
        "form": form,
        "loss_history": tuple(fit.loss_history),
        "clamped": given.precond.clamped or None,
    }
    error = measure({m: Dense(B @ A, b) for m, (B, A, b) in factors.items()}, moments)
    reports = {
        m: Report(rank=r, of=layout[m].full, relative_error=error, **common | facts[m])
        for m, r in zip("qk", pair, strict=True)
    }
    mean = given.mean if given.centred else None
    fits = {m: Fit(*f, reports[m], measure, mean=mean if f[2] is not None else None) for m, f in factors.items()}
    return _scores_as_targets(fits, given, W_q, W_k, options) if method.bits else fits


def _scores_as_targets(fits: dict[str, Fit], given: Input, W_q, W_k, options: dict) -> dict[str, Fit]:
    """What is refined under rounding: each side's own fit, in the metric that the other side makes of its heads."""
    means = (None, None)
    if affine := options.get("affine"):
        means = (W_q @ affine.mean.to(W_q) + affine.b_q, W_k @ affine.mean.to(W_k) + affine.b_k)
    S_q, S_k = (
        W @ given.C @ W.mT if mean is None else W @ given.C @ W.mT + head_moments(mean[..., None])
        for W, mean in zip((W_q, W_k), means, strict=True)
    )
    rotations = options.get("rotations")
    metrics = {"q": across(S_k, rotations, W_q, left=True), "k": across(S_q, rotations, W_k, left=False)}
    targets = {m: RoundingTarget(product(fit).weight, _about(given, fit.mean), metrics[m]) for m, fit in fits.items()}
    return {m: fit._replace(target=targets[m]) for m, fit in fits.items()}


def _about(given: Input, mean: torch.Tensor | None) -> torch.Tensor:
    """The moment of an input about its mean where a bias takes that, about 0 else."""
    return given.C + torch.outer(given.mean, given.mean) if given.centred and mean is None else given.C


def _head_junction(view: BlockView, slot: Slot, fits: dict[str, Fit], dense: dict[str, Dense]):
    """Keys or values with an identity in every head (Eq. 79-80, 187-188).

    Returned are ``fits`` and ``dense`` with queries or an output projection that take up the other factor, and their
    junction. The identity in ``A`` is made first: it acts on the latent, this one on the heads, so both stay.
    """
    mine, other = fits[slot.name], PARTNERS[slot.name]
    parts, partner = in_junction(slot, mine), fits.get(other, dense[other])
    facing = _facing(other, partner).unflatten(0, (view.attention.heads, -1))
    B = parts.numbers["B"].unflatten(0, (slot.heads, -1))  # (K, h, R), with columns that become the identity
    b_q, b_k = (None if b is None else b.to(B).view(M.shape[:2]) for b, M in ((partner.bias, facing), (mine.bias, B)))
    b_q = None if other == "o" else b_q
    found = head_block_identity(facing, B, b_q=b_q, b_k=b_k, limit=slot.method.condition_limit)
    T = B.gather(2, found.order[:, None, : B.shape[1]].expand(-1, B.shape[1], -1))
    bias, report = (
        None if found.b_k is None else found.b_k.flatten(),
        replace(mine.report, head_condition=found.condition),
    )
    changed = {slot.name: _in_heads(mine, T)._replace(bias=bias, report=report)}
    kept = dict(dense)
    bias = partner.bias if found.b_q is None else found.b_q.flatten()
    if isinstance(partner, Fit):
        turned = _inputs_in_heads(partner, T) if other == "o" else _in_heads(partner, torch.linalg.inv(T).mT)
        changed[other] = turned._replace(bias=bias)
    else:
        weight = found.B_q.flatten(0, 1).to(partner.weight.dtype)
        kept[other] = Dense(
            weight.T.contiguous() if other == "o" else weight, None if bias is None else bias.to(weight)
        )
    numbers, indices = {"A": parts.numbers["A"], "B.rest": found.B_k2}, parts.indices | {"B.order": found.order}
    return fits | changed, kept, parts._replace(numbers=numbers, indices=indices)


def _facing(name: str, projection: Fit | Dense) -> torch.Tensor:
    """Return the rows of queries, or the columns of an output projection, that meet the other side's heads, as rows."""
    if isinstance(projection, Fit):
        return projection.A.T if name == "o" else projection.B
    weight = projection.weight.double()
    return weight.T if name == "o" else weight


def _in_heads(fit: Fit, T: torch.Tensor) -> Fit:
    """``fit`` with outputs ``T^-1 y`` of each head; errors stay those of ``y``."""
    groups, target = T, fit.target
    T = of_heads(T, fit.B)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(T, rows.to(T).unflatten(0, (len(T), -1))).flatten(0, 1)

    if target is not None:
        heads = T.mT @ T if target.heads is None else T.mT @ target.heads @ T
        target = RoundingTarget(turned(target.weight), target.inputs, heads)
    return fit._replace(B=turned(fit.B), measure=_measured_in_heads(fit, groups), target=target)


def _inputs_in_heads(fit: Fit, T: torch.Tensor) -> Fit:
    """``fit`` with inputs ``T^-1 x`` of each head; errors stay those for ``x``."""
    inverse, target = torch.linalg.inv(T), fit.target
    if target is not None:
        inputs = on_heads(inverse, on_heads(inverse, target.inputs).T)
        target = RoundingTarget(on_heads(T.mT, target.weight.T).T, inputs, target.heads)
    mean = None if fit.mean is None else on_heads(inverse, fit.mean[:, None])[:, 0]
    A, measure = on_heads(T.mT, fit.A.T).T, _measured_in_heads(fit, T)
    return fit._replace(A=A, measure=measure, target=target, mean=mean)


def _measured_in_heads(fit: Fit, T: torch.Tensor) -> Measure:
    """The measure of ``fit``; scores and outputs of heads are the same in any coordinates that both sides share."""
    measure: Any = fit.measure
    if isinstance(measure, ScoreError | HeadError):
        return measure
    return InHeads(measure, ("v", "o") if isinstance(measure, AttendedError) else (measure.name,), T)


def _joint_vo(
    view: BlockView, given: Input, moments, ranks, layout: dict[str, Slot], dense, passes: bool
) -> dict[str, Fit]:
    """App. G: shared latents of values and outputs; biases folded into the output's (G.1) where the mean passes."""
    attention, v, o, method = view.attention, dense["v"], dense["o"], layout["v"].method
    W_v, b_v = _heads(v, attention.kv_heads)
    W_o = o.weight.double().unflatten(1, (attention.heads, -1)).transpose(0, 1)  # (H, D, N)
    means = W_v @ given.mean + present(b_v) if given.centred and not passes else None
    pair = (ranks["o"], ranks["v"])
    fit = joint_vo(W_o, W_v, given.precond, ranks=pair, means=means, alternations=method.alternations)
    form, aware = "joint vo", None
    if method.attention_aware:
        sent, form = moments["attention_output"], "joint vo, attention aware"
        C_o = sent.covariance() if given.centred else sent.second_moment()
        aware = attention_aware_output(W_o, W_v, fit, given.precond, C_o, rank=ranks["o"])
        fit = fit._replace(B_o=aware.B_o, A_o=aware.A_o)
    A_o = fit.A_o.transpose(0, 1).flatten(1)  # (r_o, H N)
    bias_o, bias_v = o.bias, v.bias
    if means is not None:
        bias_v = (means - fit.B_v @ (fit.A_v @ given.mean)).flatten()
    elif given.centred:
        bias_o = vo_bias(W_o, W_v, fit, mean=given.mean, b_v=b_v, b_o=o.bias.double())
        bias_v = None if v.bias is None else torch.zeros_like(v.bias)
        if aware:  # attention does not send the mean token
            values = W_v @ given.mean + (0 if b_v is None else b_v)
            rest = sent.mean - values.repeat_interleave(attention.heads // attention.kv_heads, 0).flatten()
            bias_o = bias_o + o.weight.double() @ rest - fit.B_o @ (A_o @ (aware.E @ rest))
    factors = {"v": (fit.B_v.flatten(0, 1), fit.A_v, bias_v), "o": (fit.B_o, A_o, bias_o)}
    measure = HeadError(v, o, attention.head_dim, passes)
    if aware:
        measure = AttendedError(v, o, attention.head_dim, given.centred, aware.E, given.mean)
    error = measure({m: Dense(B @ A, b) for m, (B, A, b) in factors.items()}, moments)
    common: dict[str, Any] = {"form": form, "relative_error": error, "loss_history": tuple(fit.loss_history)}
    common["clamped"] = given.precond.clamped or None
    fits = {m: Fit(*f, Report(rank=ranks[m], of=layout[m].full, **common), measure) for m, f in factors.items()}
    return _heads_as_targets(fits, given, W_v, W_o, moments, aware, means) if method.bits else fits


def _heads_as_targets(fits: dict[str, Fit], given: Input, W_v, W_o, moments, aware, means) -> dict[str, Fit]:
    """What is refined under rounding: the fit of each side, values by their use in the output, the output by values."""
    heads = len(W_o) // len(W_v)
    metric = (W_o.mT @ W_o).unflatten(0, (len(W_v), -1)).sum(1)  # (K, h, h)
    taken = given.mean if given.centred and fits["v"].bias is not None else None
    v = fits["v"]._replace(mean=taken)
    sent = None
    if aware:
        C_o = aware.E @ moments["attention_output"].second_moment() @ aware.E.T
    else:
        values = W_v @ given.C @ W_v.mT
        if means is not None:
            values = values + head_moments(means[..., None])
        elif given.centred:  # the bias of the values has gone into that of the output
            sent = (product(v).weight @ given.mean).unflatten(0, (len(W_v), -1)).repeat_interleave(heads, 0).flatten()
        C_o = torch.block_diag(*values.repeat_interleave(heads, 0))
    v = v._replace(target=RoundingTarget(product(v).weight, _about(given, taken), metric))
    o = fits["o"]._replace(mean=sent, target=RoundingTarget(product(fits["o"]).weight, C_o))
    return {"v": v, "o": o}
