"""What of a compressed model is trained: adapters or its own weights, with its ranks and zeros as they are."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .._utils.extras import require
from .._utils.present import present
from ..architectures import Architecture, architecture_of
from ..errors import OptionError, UnsupportedModelError, option
from ..linalg.stochastic_rounding import round_stochastically
from ..models.auto_classes import check_writes
from ..modules.tensors import QuantizedTensor

Tune = Literal["lora", "lora-mlp", "all", "norms"]
ZEROS = 0.25  # a weight with a larger fraction of zeros has them on purpose


def check_trainable(model: PreTrainedModel, tune: Tune) -> None:
    """Raise where a model cannot be trained as it is stored.

    Raises:
        UnsupportedModelError: it has factors in integers, or predicts no next token.
        OptionError: adapters would fill its zeros.
    """
    if any(isinstance(module, QuantizedTensor) for module in model.modules()):
        raise UnsupportedModelError(
            "the model has quantised factors, which cannot be trained; compress it without bits"
        )
    check_writes(model.config, type(model).__name__)
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} predicts no next token, so there is nothing to recover")
    if tune.startswith("lora") and mask_of_zeros(model):
        raise OptionError(
            f"{option('tune', tune)} would fill the zeros of a semi-structured model; give {option('tune', 'all')}"
        )


def mask_of_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> where a weight is not zero, of every matrix that has zeros on purpose."""
    masks = {name: weight != 0 for name, weight in model.named_parameters() if weight.dim() == 2}
    return {name: mask for name, mask in masks.items() if mask.float().mean() < 1 - ZEROS}


def prepared(model: PreTrainedModel, tune: Tune, rank: int, seed: int) -> nn.Module:
    """Return the model with nothing but what is tuned requiring a gradient; PEFT's adapters are around it.

    Args:
        tune: ``lora``: adapters on all linear layers of the blocks, so not on the stacked weights of experts, nor on
            what several blocks share;
            ``lora-mlp``: on those of the MLPs; ``all``: all weights but embeddings and head; ``norms``: scales and
            shifts of norms.
        rank: of adapters.
        seed: of the numbers that adapters begin with.
    """
    model.requires_grad_(False)
    if tune.startswith("lora"):
        require("peft", option("tune", tune), f"give {option('tune', 'all')}")
        from peft import LoraConfig, get_peft_model

        targets = _linear_layers(model, mlp_only=tune == "lora-mlp")
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        with torch.random.fork_rng(), warnings.catch_warnings():  # Trainer sets the seed too late for them
            torch.manual_seed(seed)
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for a name of before
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # it knows GPT-2's layers, and says so
            return get_peft_model(model, adapters)
    tied = {id(p) for p in present(model.get_output_embeddings()).parameters()}
    for parameter in own_weights(model, tune):
        parameter.requires_grad_(id(parameter) not in tied)
    return model


def own_weights(model: nn.Module, tune: Tune) -> Iterator[nn.Parameter]:
    """Yield the weights that ``all`` or ``norms`` trains, of a model or a block; a tied head is one of a model's."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) or (tune == "norms" and "norm" not in type(module).__name__.lower()):
            continue
        yield from (parameter for parameter in module.parameters(recurse=False) if parameter.is_floating_point())


def round_weights(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Round weights to what will be written of them, so that steps below half a unit in the last place are not lost."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = round_stochastically(parameter.data, dtype, generator).to(parameter.dtype)


def _linear_layers(model: PreTrainedModel, *, mlp_only: bool) -> list[str]:
    left_out = tuple(f"{path}." for path in _attentions(model, architecture_of(model))) if mlp_only else ()
    read = set(model.get_decoder().modules())  # neither the head, nor what reads images
    # A weight of several layers would take the adapters of all of them when they are merged.
    layers = [module for module in read if isinstance(module, nn.Linear | Conv1D)]
    owners = Counter(id(layer.weight) for layer in layers)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module in read
        and owners[id(module.weight)] == 1
        and module.weight.numel()
        and not name.endswith((".mamba.out_proj", ".mixer.out_proj"))  # fused kernels read its weight; PEFT refuses it
        and not name.startswith(left_out)
    ]
    if not found:
        raise UnsupportedModelError(
            "the model has no linear layer to put adapters on (stacked weights of experts take none); give "
            f"{option('tune', 'all')}"
        )
    return found


def _attentions(model: PreTrainedModel, family: Architecture) -> Iterator[str]:
    """Paths of the attention of every block, or of what it has in its place."""
    for index, block in enumerate(model.get_submodule(family.blocks).children()):
        if (spec := family.attention_of(block)).is_there:
            yield f"{family.path_of(index)}.{spec.path}"


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set dropout to probability 0 for a while: a few minutes of distillation have nothing to overfit."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ((name == "p" and isinstance(module, nn.Dropout)) or "dropout" in name)
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)
