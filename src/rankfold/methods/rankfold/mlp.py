"""The MLP: its down projection corrected by what the stream lacks, then hidden units eliminated one after another."""

from ...architectures import BlockView
from ..base import BlockResult
from ..modegpt.mlp import reduce_mlp
from .missing import repair

__all__ = ["decompose_mlp"]


def decompose_mlp(method, view: BlockView, moments, held_out, rank: int) -> BlockResult:
    """Units go by what they cost the corrected projection, and the others take over their part of the correction too."""
    result, down, report = BlockResult({}, {}, {}, {}), view.mlp.down, {}
    if "mlp_feedback" in moments and rank < view.mlp.hidden:
        others = held_out()
        if others is None:
            report = {"feedback": 0.0}  # nothing could confirm it
        else:
            centred = method.bias_refit and down.bias is not None
            down, report = repair(down, moments, others, ("mlp_hidden", "mlp_feedback"), centred=centred)
    reduce_mlp(method, view, down, moments, rank, result)
    result.reports["mlp"] |= report
    return result
