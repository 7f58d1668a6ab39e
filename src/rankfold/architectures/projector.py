"""What stands between a vision tower and a language model: an MLP by itself, in LLaVA and its kin and in Qwen-VL."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

__all__ = ["PROJECTORS"]


def _projector(blocks: str, up: str, down: str) -> Architecture:
    """Of the MLP at the end of this path."""
    return Architecture(
        model_type="projector",
        blocks=blocks,
        attention=AttentionSpec(
            path="",
            qkv=(),
            output=down,
            outside=True,
            kv_heads=None,
            position="none",
            width=None,
            scaling=1.0,
            beyond="it has no attention",
        ),
        mlp=MLPSpec(up=up, down=down, width=None),
        middle=None,
        adds=False,
        decoder=False,
        projects=True,
    )


def _merger(up: str, down: str) -> Architecture:
    """The one that makes a token of four patches, at the end of Qwen-VL's tower."""
    found = _projector("visual.merger", up, down)
    return replace(found, attention=replace(found.attention, packed=True))


PROJECTORS = (
    _projector("multi_modal_projector", "linear_1", "linear_2"),
    _merger("mlp.0", "mlp.2"),
    _merger("linear_fc1", "linear_fc2"),
)
