"""Compressed checkpoints in vLLM: a plugin of its group ``vllm.general_plugins``, found wherever rankfold is installed.

vLLM's backend for transformers models builds the model from its config, which with rankfold's modules registered is the
compressed one, and puts its own layers and attention in place. What is left to do is here: choose that backend, give
every block a cache of its own width, and fill the indices, which are no parameters. It needs vLLM 0.32 or newer.
"""

# pyright: reportMissingImports=false
# vLLM is installed for itself: its dependencies exclude those of rankfold's other extras.

import functools
import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform
from vllm.transformers_utils.config import HFConfigParser, register_config_parser

from ..errors import CheckpointError, UnsupportedModelError, method_option, option
from ..exports.vllm import why_refused
from ..modules import METHOD_NAMES, CompressedAttention, LatentLinear, PredictedNorm, SparseLinear, SplitHeadLinear

NAME = "RankfoldForCausalLM"
APART = (LatentLinear, SplitHeadLinear, SparseLinear)


class _Nothing(QuantizationConfig):
    """A compressed checkpoint is no quantised one: its floats are loaded as they are."""

    def get_name(self):
        return METHOD_NAMES[0].lower()

    def get_supported_act_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class _Parser(HFConfigParser):
    """Names the class below where a config is that of a compressed model; a config names only its stock class."""

    def parse(self, *args, **kwargs):
        values, config = super().parse(*args, **kwargs)
        description = values.get("quantization_config") or {}
        if description.get("quant_method") in METHOD_NAMES:
            config.architectures = [NAME]
        return values, config


class CompressedForCausalLM(TransformersForCausalLM):
    """A compressed model under vLLM."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        if reason := why_refused(config, config.quantization_config["modules"]):
            raise UnsupportedModelError(reason)
        config.quantization_config["quant_method"] = METHOD_NAMES[0]  # vLLM respells it
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.model.modules():
            if hasattr(module, "check_indices") or hasattr(module, "unpack"):
                for name, buffer in list(module.named_buffers(recurse=False)):  # vLLM fills parameters only
                    delattr(module, name)
                    module.register_parameter(name, self._filled(module, nn.Parameter(buffer, requires_grad=False)))

    def _filled(self, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter that is filled with the rows of this device's heads, where a module has a share of them."""
        if self.tp_group.world_size > 1 and isinstance(module, CompressedAttention):
            first = module.kv_heads * self.tp_group.rank_in_group
            parameter.data = parameter.data[: module.kv_heads]
            loading: Any = parameter  # vLLM looks for it there
            loading.weight_loader = lambda mine, loaded: mine.data.copy_(loaded[first : first + module.kv_heads])
        return parameter

    def recursive_replace(self) -> None:
        for module in list(self.model.modules()):
            if any(isinstance(child, APART) for child in module.children()):
                module.__class__ = _apart(type(module), tuple(type(child) for child in module.children()))
        if (count := self.tp_group.world_size) > 1:
            self._share(count)
        super().recursive_replace()

    def _share(self, count: int) -> None:
        """Give each of so many devices its share of the heads of every compressed attention, whatever its family calls
        them.

        Raises:
            UnsupportedModelError: something cannot be shared by so many.
        """
        plan = dict(self.model.tp_plan or {})
        for name, module in self.model.named_modules():
            if isinstance(module, APART):
                raise UnsupportedModelError(
                    f"{name} is a {type(module).__name__}, whose factors are of all heads and units together, got "
                    f"tensor_parallel_size {count}; leave it out, or compress with "
                    f"{option('method', 'rankfold')} or modegpt"
                )
            if isinstance(module, CompressedAttention):
                if module.norms_all_heads or isinstance(module.q_norm, PredictedNorm):
                    raise UnsupportedModelError(
                        f"{name} normalises queries and keys by what all heads have, got tensor_parallel_size {count}; "
                        f"leave it out, or compress with {method_option('modules', ('mlp',))}"
                    )
                styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
                plan |= {re.escape(f"{name}.{layer}"): style for layer, style in styles.items()}
                check_shares(name, "key/value heads", module.kv_heads, count)
                module.heads, module.kv_heads = module.heads // count, module.kv_heads // count
            if isinstance(module, nn.Linear):
                style = next((style for pattern, style in plan.items() if re.match(pattern, name)), None)
                if style == "colwise":
                    check_shares(name, "outputs", module.out_features, count)
        self.model.tp_plan = plan

    def _create_attention_instances(self, prefix: str = "") -> None:
        """One cache for every block, as wide as the wider of its keys and values."""
        super()._create_attention_instances(prefix)  # blocks that are dense, and the places of all
        context = self.compilation_config.static_forward_context
        for place, _ in self.attention_fusers.values():
            module = self.get_submodule(place)
            if isinstance(module, CompressedAttention):
                name = maybe_prefix(prefix, f"{place}.attn")
                context.pop(name, None)
                module.attn = self._attention(module, name)

    def _attention(self, module: CompressedAttention, name: str) -> Attention:
        width = max(module.qk_dim, module.vo_dim)
        check_width(width, name)
        return Attention(
            num_heads=module.heads,
            head_size=width,
            scale=module.scaling,
            num_kv_heads=module.kv_heads,
            cache_config=self.cache_config,
            quant_config=self.quant_config,
            logits_soft_cap=module.softcap,
            per_layer_sliding_window=module.sliding_window,
            prefix=name,
        )

    def load_weights(self, weights) -> set[str]:
        loaded = super().load_weights(weights)
        lacking = sorted({name for name, _ in self.named_parameters()} - loaded)
        if lacking:
            raise CheckpointError(
                f"the checkpoint lacks {lacking[0]} and {len(lacking) - 1} more tensors; copy it again"
            )
        for name, module in self.model.named_modules():
            if hasattr(module, "check_indices"):
                module.check_indices(name)
        return loaded


@functools.cache
def _apart(cls: type, children: tuple[type, ...]) -> type:
    """A class for modules of ``cls`` with children of these classes: vLLM decides by class what it fuses."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__})


def check_shares(name: str, what: str, of_all: int, count: int) -> None:
    """Raise :class:`UnsupportedModelError` where so many devices cannot have equal shares."""
    if of_all % count:
        raise UnsupportedModelError(
            f"{name} has {of_all} {what}, which cannot be shared by tensor_parallel_size {count}; take a divisor, or "
            f"compress with {method_option('target', 'vllm')}, which has units in multiples of 32"
        )


def check_width(width: int, name: str) -> None:
    """Raise :class:`UnsupportedModelError` where vLLM's kernels on the CPU have no such head size."""
    if width < 1 or (current_platform.is_cpu() and (width < 32 or width % 16)):
        raise UnsupportedModelError(
            f"{name} has heads {width} wide, and vLLM on the CPU runs multiples of 16 from 32 on; compress with "
            f"{method_option('target', 'vllm')}"
        )


def register() -> None:
    """Called by vLLM in each of its processes."""
    forward: Any = CompressedAttention.forward
    forward.__wrapped__ = CompressedAttention._attend  # in whose source vLLM looks for attention
    for name in METHOD_NAMES:
        register_quantization_config(name.lower())(_Nothing)  # so vLLM spells the names of all methods
    register_config_parser("hf")(_Parser)
    ModelRegistry.register_model(NAME, f"{__name__}:{CompressedForCausalLM.__name__}")
