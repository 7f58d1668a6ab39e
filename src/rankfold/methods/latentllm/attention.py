"""Attention through latents: local, joint query-key, joint value-output, one latent for queries, keys and values.

Shape legend: H query heads, K key/value heads, N head dimension, D model width.
"""

import torch

from ...architectures import BlockView, Dense
from ...linalg.joint_qk import Affine, choose_ranks, joint_qk, rope_rotations
from ...linalg.joint_vo import attention_aware_output, joint_vo, vo_bias
from ...linalg.junction import head_block_identity
from ..base import BlockResult
from ..result import Projection, put_attention
from .factor import Fit, Input, local, prepare
from .layout import QKV, Slot, dense_projections, slots
from .storing import in_junction, put_together, store

ATTENTION = ("q", "k", "v", QKV, "o")


def decompose_attention(method, view: BlockView, moments, ranks: dict[str, int], result: BlockResult) -> None:
    """Replace the attention module by one whose projections listed in ``ranks`` are latent."""
    dense = {m: d for m, d in dense_projections(method, view).items() if m in ATTENTION}
    joint, refit, inputs = method.joint_forms(view), method.bias_refit, {}

    def given(module: str, mean_into: str | None = None) -> Input:
        key = (module == "o", refit and dense[mean_into or module].bias is not None)
        if key not in inputs:
            statistic = "attention_output" if key[0] else "attention_input"
            inputs[key] = prepare(method, moments[statistic], centred=key[1])
        return inputs[key]

    ranks, fits, layout = dict(ranks), {}, slots(method, view)
    if "qk" in joint and {"q", "k"} <= ranks.keys():
        fits |= _joint_qk(view, given("q"), ranks, layout, dense)
    if "vo" in joint and {"v", "o"} <= ranks.keys():
        fits |= _joint_vo(view, given("v", mean_into="o"), moments, ranks, layout, dense)
    for module in [m for m in ranks if m not in fits]:
        fits[module] = local(layout[module], dense[module], given(module), ranks[module])
    stored: dict[str, Projection] = dict(dense)
    if "k" in fits and layout["k"].head_identity:
        stored["k"] = _head_junction(view, layout, dense, fits, stored)
    stored |= {m: store(layout[m], fits[m], dense[m].weight.dtype) for m in fits if stored[m] is dense[m]}
    result.reports.update({module: fits[module].report for module in ranks})
    if QKV in dense and QKV not in fits:  # only the output projection loses weights
        del stored[QKV]
        stored |= dict(zip("qkv", view.attention.qkv(), strict=True))
    width = view.attention.head_dim
    put_attention(result, view.attention, stored, width, width, None, method.cached_latents(view, ranks))


def _heads(dense: Dense, heads: int):
    weight = dense.weight.double().unflatten(0, (heads, -1))
    return weight, None if dense.bias is None else dense.bias.double().unflatten(0, (heads, -1))


def _joint_qk(view: BlockView, given: Input, ranks: dict[str, int], layout: dict[str, Slot], dense) -> dict[str, Fit]:
    """Algorithm 1: shared latents of queries and keys with the smallest error of the scores; may change ``ranks``."""
    attention, method = view.attention, layout["q"].method
    (W_q, b_q), (W_k, b_k) = _heads(dense["q"], attention.heads), _heads(dense["k"], attention.kv_heads)
    options = {}
    if given.centred:
        options["affine"] = Affine(given.mean, b_q, b_k if b_k is not None else torch.zeros_like(W_k[..., 0]))
    if attention.rotary_dim and method.window:
        options["rotations"] = rope_rotations(view.inv_freq.double(), attention.head_dim, window=method.window)
    report = {"form": "joint qk" + (f", window {method.window}" if "rotations" in options else "")}
    planned = {m: {"planned_rank": ranks[m], "planned_weights": layout[m].numbers(ranks[m])} for m in "qk"}
    if method.qk_ranks == "spectra":
        budget = sum(p["planned_weights"] for p in planned.values())
        pair = choose_ranks(W_q, W_k, given.precond, budget=budget, multiple=method.multiple, **options)
        ranks |= dict(zip("qk", pair, strict=True))
    fit = joint_qk(W_q, W_k, given.precond, ranks=(ranks["q"], ranks["k"]), alternations=method.alternations, **options)
    report |= {"relative_error": fit.relative_error, "loss_history": fit.loss_history}
    biases = {"q": fit.b_q if given.centred else b_q, "k": fit.b_k if given.centred else b_k}
    fits = {}
    for module, B, A in (("q", fit.B_q, fit.A_q), ("k", fit.B_k, fit.A_k)):
        mine = {"rank": ranks[module], "of": layout[module].full} | report
        if method.qk_ranks == "spectra":
            mine |= {"weights": layout[module].numbers(ranks[module])} | planned[module]
        bias = None if dense[module].bias is None else biases[module].flatten()
        fits[module] = Fit(B.flatten(0, 1), A, bias, mine, None, given)
    return fits


def _head_junction(view: BlockView, layout: dict[str, Slot], dense, fits: dict[str, Fit], stored) -> Projection:
    """Keys with an identity in every head (Eq. 79-80); changes the fit of the queries, or the dense queries.

    The identity in ``A`` is made first: it acts on the latent, this one on the heads, so both stay.
    """
    attention, keys = view.attention, fits["k"]
    parts = in_junction(layout["k"], keys.B, keys.A)
    queries = fits.get("q") or Dense(dense["q"].weight.double(), dense["q"].bias)
    B_q = queries.B if isinstance(queries, Fit) else queries.weight
    fit = head_block_identity(
        B_q.unflatten(0, (attention.heads, -1)),
        parts.numbers["B"].unflatten(0, (attention.kv_heads, -1)),
        b_q=None if queries.bias is None else queries.bias.to(B_q).unflatten(0, (attention.heads, -1)),
        b_k=None if keys.bias is None else keys.bias.to(B_q).unflatten(0, (attention.kv_heads, -1)),
        limit=layout["k"].method.condition_limit,
    )
    B_q, b_q = fit.B_q.flatten(0, 1), None if fit.b_q is None else fit.b_q.flatten()
    if isinstance(queries, Fit):
        fits["q"] = queries._replace(B=B_q, bias=b_q, target=None)
    else:
        dtype = dense["q"].weight.dtype
        stored["q"] = Dense(B_q.to(dtype), None if b_q is None else b_q.to(dtype))
    keys = keys._replace(bias=None if fit.b_k is None else fit.b_k.flatten(), given=None, target=None)
    keys.report["head_condition"] = fit.condition
    numbers, indices = {"A": parts.numbers["A"], "B.rest": fit.B_k2}, parts.indices | {"B.order": fit.order}
    return put_together(layout["k"], keys, parts._replace(numbers=numbers, indices=indices), dense["k"].weight.dtype)


def _joint_vo(view: BlockView, given: Input, moments, ranks, layout: dict[str, Slot], dense) -> dict[str, Fit]:
    """App. G: shared latents of values and outputs; biases folded into the output's (G.1) where it has one."""
    attention, v, o, method = view.attention, dense["v"], dense["o"], layout["v"].method
    W_v, b_v = _heads(v, attention.kv_heads)
    W_o = o.weight.double().unflatten(1, (attention.heads, -1)).transpose(0, 1)  # (H, D, N)
    fit = joint_vo(W_o, W_v, given.precond, ranks=(ranks["o"], ranks["v"]), alternations=method.alternations)
    report = {"form": "joint vo", "relative_error": fit.relative_error, "loss_history": fit.loss_history}
    aware = None
    if method.attention_aware:
        sent = moments["attention_output"]
        C_o = sent.covariance if given.centred else sent.C
        aware = attention_aware_output(W_o, W_v, fit, given.precond, C_o, rank=ranks["o"])
        fit = fit._replace(B_o=aware.B_o, A_o=aware.A_o)
        report |= {"form": "joint vo, attention aware", "relative_error": aware.relative_error}
    A_o = fit.A_o.transpose(0, 1).flatten(1)  # (r_o, H N)
    bias_o, bias_v = o.bias, v.bias
    if given.centred:
        bias_o = vo_bias(W_o, W_v, fit, mean=given.mean, b_v=b_v, b_o=o.bias.double())
        bias_v = None if v.bias is None else torch.zeros_like(v.bias)
        if aware:  # attention does not send the mean token
            values = W_v @ given.mean + (0 if b_v is None else b_v)
            rest = sent.mean - values.repeat_interleave(attention.heads // attention.kv_heads, 0).flatten()
            bias_o = bias_o + o.weight.double() @ rest - fit.B_o @ (A_o @ (aware.E @ rest))
    factors = {
        "v": (fit.B_v.flatten(0, 1), fit.A_v, bias_v),
        "o": (fit.B_o, A_o, bias_o),
    }
    return {m: Fit(*f, {"rank": ranks[m], "of": layout[m].full} | report) for m, f in factors.items()}
