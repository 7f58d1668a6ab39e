"""What stands between a vision tower and a language model: an MLP by itself, in LLaVA and its kin and in Qwen-VL."""

from .spec import Architecture, MLPSpec, no_attention


def _projector(blocks: str, up: str, down: str, *, packed: bool = False) -> Architecture:
    """Of the MLP at the end of this path."""
    return Architecture(
        model_type="projector",
        blocks=blocks,
        attention=no_attention(down, packed=packed),
        mlp=MLPSpec(up=up, down=down, width=None),
        middle=None,
        is_plain_residual=False,
        decoder=False,
        is_projector=True,
    )


PROJECTORS = (
    _projector("multi_modal_projector", "linear_1", "linear_2"),
    # It makes a token of four patches, at the end of Qwen-VL's tower.
    _projector("visual.merger", "mlp.0", "mlp.2", packed=True),
    _projector("visual.merger", "linear_fc1", "linear_fc2", packed=True),
)
