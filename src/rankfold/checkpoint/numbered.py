"""Settings of a config about single blocks, by their numbers, and what they are once blocks are removed."""

import contextlib

from huggingface_hub.errors import StrictDataclassError

# An entry for every block.
LISTS = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers", "indexer_types"),
    *("kv_sharing_modes", "layer_rope_theta", "num_attention_heads_per_layer", "num_key_value_heads_per_layer"),
)
COUNTS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")  # so many blocks in front are of one kind
# Numbers of the blocks of one kind.
NUMBERS = ("mlp_only_layers", "fullatt_block_indexes", "deepstack_visual_indexes", "attn_layer_indices")
# Rules that the lists above were made by, where the config takes None for a rule. Only a missing list is made by them
# again.
RULES = ("sliding_window_pattern", "_sliding_window_pattern")


def cut_part(config, kept: tuple[int, ...]) -> None:
    """Leave only these blocks in the config of a stack of blocks.

    Args:
        config: changed in place.
        kept: blocks that are left, ascending.
    """
    blocks = config.num_hidden_layers
    _spell_out_experts(config, blocks)
    lists = {name: found for name in LISTS if isinstance(found := getattr(config, name, None), list | tuple)}
    for name in COUNTS:
        found = getattr(config, name, None)
        if isinstance(found, int):
            setattr(config, name, sum(block < found for block in kept))
    for name in NUMBERS:
        found = getattr(config, name, None)
        if found:
            setattr(config, name, [place for place, block in enumerate(kept) if block in found])
    if getattr(config, "layer_types", None) is not None:
        for name in RULES:
            if getattr(config, name, None) is not None:
                with contextlib.suppress(StrictDataclassError):  # a config that wants a number has the list anyway
                    setattr(config, name, None)
    if kinds := getattr(config, "block_types", None):  # RecurrentGemma's, repeated over the blocks
        config.block_types = [kinds[block % len(kinds)] for block in kept]
    config.num_hidden_layers = len(kept)
    for name, found in lists.items():
        left = [found[block] for block in kept] if len(found) >= blocks else found
        if getattr(config, name) != left:  # what other fields say cannot be set
            setattr(config, name, left)
    if getattr(config, "attention_types", None) is not None:  # GPT-Neo's list with repeats
        config.attention_types = [[config.attention_layers, 1]]
    if hasattr(
        config, "stage_names"
    ):  # of a backbone: one for every block, and what is handed out is after the last one
        config.stage_names = ["stem", *(f"stage{place + 1}" for place in range(len(kept)))]
        config.set_output_features_output_indices(out_features=None, out_indices=None)


def _spell_out_experts(config, blocks: int) -> None:
    """Blocks without experts by number, instead of a step between those with experts."""
    step = getattr(config, "decoder_sparse_step", None)
    if not isinstance(step, int) or step < 2:
        return
    config.mlp_only_layers = sorted({*config.mlp_only_layers, *(b for b in range(blocks) if (b + 1) % step)})
    config.decoder_sparse_step = 1


def cut_model(config, blocks: int, kept: tuple[int, ...]) -> None:
    """Have the config of a model name the same states of its vision tower once blocks of that are removed.

    Args:
        config: of the whole model; changed in place.
        blocks: of the dense tower.
        kept: blocks of it that are left, ascending.
    """
    found = getattr(config, "vision_feature_layer", None)  # LLaVA's: a place among the states before and after blocks
    if found is None:
        return

    def moved(layer: int) -> int:
        in_front = sum(block < layer % (blocks + 1) for block in kept)
        return in_front if layer >= 0 else in_front - len(kept) - 1

    config.vision_feature_layer = moved(found) if isinstance(found, int) else [moved(layer) for layer in found]


def named_blocks(source) -> frozenset[int]:
    """Blocks after which a model takes or adds images: of Qwen3-VL's tower by number, of its language model in turn."""
    if source.architecture.images_after_blocks:
        tower = getattr(source.model.config, "vision_config", None)
        return frozenset(range(len(getattr(tower, "deepstack_visual_indexes", None) or ())))
    return frozenset(getattr(source.config, "deepstack_visual_indexes", None) or ())
