"""What training a model as a whole takes in memory and on the disk, in bytes of tensors.

Shape legend: B sequences of a forward, T tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, TrainingArguments

from .._utils.processes import process_count
from .loss import POSITIONS, Loss, hidden_states
from .training import recomputes, training_context, trains_in_bf16

# Bytes for each weight that is trained: AdamW's two moments, and the gradient.
OPTIMISER, GRADIENT = 8, 4


def trained_weights(network: nn.Module) -> int:
    """Count the weights that training changes."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def training_memory(
    network: nn.Module,
    student: PreTrainedModel,
    others: list[nn.Module],
    ids: Tensor,
    loss: Loss,
    args: TrainingArguments,
) -> int:
    """Estimate the peak of a training, in addition to the program and its libraries.

    What a forward keeps for the backward pass differs by family, so it is measured: on a sequence, and on two where
    training takes several at once. The estimate is of one process, and of its share of a step.

    Args:
        network: what is trained: ``student``, or adapters around it.
        others: models beside it, whose weights count where they are in memory.
        ids: ``(1, T)`` a sequence.
        args: of the training; see :func:`.training.arguments`.
    """
    trained, at_once = trained_weights(network), args.per_device_train_batch_size
    checkpointing = recomputes(args)
    config, decoder = student.config.get_text_config(), student.get_decoder()
    blocks = config.num_hidden_layers
    # No more at once than training itself will keep: with checkpointing about what one block does.
    some = ids[:, : max(1, ids.shape[1] // blocks)] if checkpointing else ids
    one = kept_for_backward(network, decoder, some)
    takes_two = at_once > 1 or checkpointing
    two = kept_for_backward(network, decoder, some.expand(2, -1)) if takes_two else 2 * one
    each = (two - one) * ids.numel() // some.numel()
    always = 2 * one - two  # weights that autocast has cast
    kept, inside = at_once * each, at_once * each // blocks  # in all blocks, and in one
    if checkpointing:  # what enters every block
        kept = at_once * blocks * 4 * ids.numel() * config.hidden_size
    item = 2 if trains_in_bf16(ids.device) else 4
    of_logit = {"kl": 3 * item, "next-token": 3 * 4, "both": 2 * item + 3 * 4}[loss]
    chunk = at_once * min(POSITIONS, ids.shape[1]) * config.vocab_size * of_logit
    gradients = GRADIENT * trained * (1 + (process_count() > 1))  # DDP sends copies of them
    # A backward pass begins with the loss; then a block's activations have gradients, or are computed again.
    begin = kept + max(chunk, inside) + (gradients if args.gradient_accumulation_steps > 1 else 0)
    end = inside + gradients
    weights = sum(storages([x for m in (network, *others) for x in (*m.parameters(), *m.buffers())]).values())
    return weights + OPTIMISER * trained + always + max(begin, end)


def training_disk(network: nn.Module, student: PreTrainedModel, *, keep: bool) -> int:
    """Estimate the most that an unfinished run takes on the disk: the best state, and two checkpoints.

    Args:
        network: what is trained: ``student``, or adapters around it, of which a checkpoint holds no more.
        keep: whether there are checkpoints.
    """
    trained, item = trained_weights(network), torch.float32.itemsize
    weights = sum(p.numel() for p in student.parameters()) if network is student else trained
    return 2 * keep * (item * weights + OPTIMISER * trained) + item * trained


@torch.enable_grad()
def kept_for_backward(network: nn.Module, decoder: nn.Module, ids: Tensor) -> int:
    """Measure what a forward of ``(B, T)`` ids keeps for the backward pass, other than the network's own weights.

    Args:
        network, decoder: see :func:`.loss.hidden_states`.
    """
    own, kept = storages([*network.parameters(), *network.buffers()]), list[Tensor]()
    nothing = torch.empty(0)  # for a backward pass, which does not come

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach())
        return nothing

    with saved_tensors_hooks(keep, lambda x: x), training_context(ids.device):
        hidden_states(network, decoder, ids)
    return sum(size for place, size in storages(kept).items() if place not in own)


def storages(tensors: list) -> dict[int, int]:
    """Return where tensors are -> their bytes; each place once, however many tensors share it, and none on meta."""
    places = (x.untyped_storage() for x in tensors if not x.is_meta)
    return {place.data_ptr(): place.nbytes() for place in places}
