"""Attention through latents: local, joint query-key, joint value-output.

Shape legend: H query heads, K key/value heads, N head dimension, D model width.
"""

import torch

from ...architectures import BlockView, Dense
from ...linalg.joint_qk import Affine, joint_qk, rope_rotations
from ...linalg.joint_vo import joint_vo, vo_bias
from ..base import BlockResult
from ..result import Projection, put_attention
from .factor import Input, latent_of, local, prepare


def decompose_attention(
    method, view: BlockView, moments, ranks: dict[str, int], joint: set[str], latent_cache: str, result: BlockResult
) -> None:
    """Replace the attention module by one whose projections listed in ``ranks`` are latent."""
    attention = view.attention
    projections: dict[str, Projection] = dict(zip("qkv", attention.qkv(), strict=True)) | {"o": attention.output}
    refit = method.bias_refit
    inputs: dict[bool, Input] = {}

    def given(dense: Dense) -> Input:
        centred = refit and dense.bias is not None
        if centred not in inputs:
            inputs[centred] = prepare(method, moments["attention_input"], centred=centred)
        return inputs[centred]

    rest = dict(ranks)
    if "qk" in joint and {"q", "k"} <= ranks.keys():
        _joint_qk(method, view, given(projections["q"]), ranks, projections, result)
        rest = {m: r for m, r in rest.items() if m not in "qk"}
    if "vo" in joint and {"v", "o"} <= ranks.keys():
        _joint_vo(method, view, moments, ranks, projections, result)
        rest = {m: r for m, r in rest.items() if m not in "vo"}
    for module, rank in rest.items():
        dense = projections[module]
        if module == "o":
            where = prepare(method, moments["attention_output"], centred=refit and dense.bias is not None)
        else:
            where = given(dense)
        projections[module], result.reports[module] = local(method, dense, where, rank)
    put_attention(result, attention, projections, attention.head_dim, attention.head_dim, None, latent_cache)


def _heads(dense: Dense, heads: int):
    weight = dense.weight.double().unflatten(0, (heads, -1))
    return weight, None if dense.bias is None else dense.bias.double().unflatten(0, (heads, -1))


def _joint_qk(method, view: BlockView, given: Input, ranks, projections, result: BlockResult) -> None:
    """Algorithm 1: shared latents of queries and keys with the smallest error of the scores."""
    attention = view.attention
    (W_q, b_q), (W_k, b_k) = _heads(projections["q"], attention.heads), _heads(projections["k"], attention.kv_heads)
    affine = None
    if given.centred:
        affine = Affine(given.mean, b_q, b_k if b_k is not None else torch.zeros_like(W_k[..., 0]))
    rotations = None
    if attention.rotary_dim and method.window:
        rotations = rope_rotations(view.inv_freq.double(), attention.head_dim, window=method.window)
    fit = joint_qk(
        W_q,
        W_k,
        given.precond,
        ranks=(ranks["q"], ranks["k"]),
        affine=affine,
        rotations=rotations,
        alternations=method.alternations,
    )
    biases = {"q": fit.b_q if given.centred else b_q, "k": fit.b_k if given.centred else b_k}
    for module, B, A in (("q", fit.B_q, fit.A_q), ("k", fit.B_k, fit.A_k)):
        dense: Dense = projections[module]
        bias = None if dense.bias is None else biases[module].flatten().to(dense.bias.dtype)
        projections[module], condition = latent_of(method, B.flatten(0, 1), A, bias, dense.weight.dtype)
        result.reports[module] = {
            "rank": ranks[module],
            "of": min(dense.weight.shape),
            "form": "joint qk" + (f", window {method.window}" if rotations is not None else ""),
            "relative_error": fit.relative_error,
            "loss_history": fit.loss_history,
            "junction_condition": condition,
        }


def _joint_vo(method, view: BlockView, moments, ranks, projections, result: BlockResult) -> None:
    """App. G: shared latents of values and outputs; biases folded into the output's (G.1) where it has one."""
    attention, v, o = view.attention, projections["v"], projections["o"]
    moment = moments["attention_input"]
    centred = method.bias_refit and o.bias is not None
    given = prepare(method, moment, centred=centred)
    W_v, b_v = _heads(v, attention.kv_heads)
    W_o = o.weight.double().unflatten(1, (attention.heads, -1)).transpose(0, 1)  # (H, D, N)
    fit = joint_vo(W_o, W_v, given.precond, ranks=(ranks["o"], ranks["v"]), alternations=method.alternations)
    bias_o, bias_v = o.bias, v.bias
    if centred:
        bias_o = vo_bias(W_o, W_v, fit, mean=given.mean, b_v=b_v, b_o=o.bias.double()).to(o.bias.dtype)
        bias_v = None if v.bias is None else torch.zeros_like(v.bias)
    A_o = fit.A_o.transpose(0, 1).flatten(1)  # (r_o, H N)
    for module, B, A, dense, bias in (
        ("v", fit.B_v.flatten(0, 1), fit.A_v, v, bias_v),
        ("o", fit.B_o, A_o, o, bias_o),
    ):
        projections[module], condition = latent_of(method, B, A, bias, dense.weight.dtype)
        result.reports[module] = {
            "rank": ranks[module],
            "of": min(dense.weight.shape),
            "form": "joint vo",
            "relative_error": fit.relative_error,
            "loss_history": fit.loss_history,
            "junction_condition": condition,
        }
