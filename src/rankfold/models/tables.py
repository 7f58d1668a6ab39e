"""Tables that a model class computes from its config alone, before there is a weight: of positions, of masks."""

from transformers import PreTrainedModel

from ..architectures import context_of
from ..errors import CheckpointError

MOST_BYTES = 2**31  # GPT-Neo 2.7B, whose every block has a mask of all its positions, takes 134 MB


def check_tables(model: PreTrainedModel) -> None:
    """Raise :class:`CheckpointError` where the tables of a model, all of it on the meta device, are larger than any
    there are.

    GPT-J and GPT-Neo keep one in every block, as long as the config has positions.
    """
    saved = model.state_dict().keys()
    size = sum(table.nbytes for name, table in model.named_buffers() if name not in saved)
    if size > MOST_BYTES:
        positions = context_of(model.config)
        raise CheckpointError(
            f"config.json describes a model that makes {size / 1e9:,.1f} GB of tables before it has a weight, for "
            f"{positions} positions; correct max_position_embeddings (also called n_positions) and rotary_dim in "
            "config.json"
        )
