"""The way in through transformers.

``config.json`` names, under ``quantization_config``, each replaced module with its sizes. Transformers builds the dense
architecture on the meta device, a registered ``HfQuantizer`` swaps the named modules for smaller ones
(:func:`~rankfold.modules.building.install`), and the ordinary loader fills them. Nothing here knows a model family.
"""

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from .attention import CompressedAttention, PackedAttention
from .building import install
from .bundle import CODE_FILE, code
from .tensors import QuantizedTensor

# What meets a checkpoint without this code names the method that it does not know: transformers, lm-eval and engines
# alike. So the name says what helps. Checkpoints with the plain name were written before.
METHOD_NAME = "rankfold (import rankfold first, or give trust_remote_code=True)"
METHOD_NAMES = (METHOD_NAME, "rankfold")
FORMAT = 2
FORMATS = (1, 2)  # that are read; in the first one factors were tensors of the latent layer, not layers
_FACTORS = {rf"\.{name}$": f".{name}.weight" for name in ("A", "B", "rest")}
_CODE = CODE_FILE.removesuffix(".py")
AUTO_MAP = {"AutoConfig": f"{_CODE}.RankfoldAutoConfig", "AutoModelForCausalLM": f"{_CODE}.RankfoldForCausalLM"}


def digest(modules: dict) -> str:
    """Of the description of all modules. A size that is changed shows in the weights; a scale would not."""
    return hashlib.sha256(json.dumps(modules, sort_keys=True).encode()).hexdigest()[:16]


def current_name(name: str, written: int | None) -> str:
    """What a tensor of a checkpoint of an earlier format is called in this one."""
    if written == 1:
        for pattern, now in _FACTORS.items():
            name = re.sub(pattern, now, name)
    return name


class RankfoldConfig(QuantizationConfigMixin):
    """``quantization_config`` of a compressed checkpoint: what was done and which modules are in place."""

    quant_method: Any  # transformers' type for it lists its own names only

    def __init__(self, modules: dict | None = None, **fields):
        self.quant_method = METHOD_NAME
        self.modules = modules or {}
        self.fields = {k: v for k, v in fields.items() if k != "quant_method"}

    def to_dict(self) -> dict:
        return {"quant_method": METHOD_NAME, **self.fields, "modules": self.modules}

    def __repr__(self) -> str:
        return f"RankfoldConfig(method={self.fields.get('method')!r}, {len(self.modules)} modules)"


class RankfoldQuantizer(HfQuantizer):
    """Rebuilds the compressed structure between "model created" and "weights loaded"."""

    quantization_config: RankfoldConfig
    requires_calibration = False

    def _process_model_before_weight_loading(self, model, **kwargs):
        written = self.quantization_config.fields.get("format")
        if written not in FORMATS:
            raise ValueError(
                f"this checkpoint has rankfold format {written!r}, this version reads "
                f"{' and '.join(map(str, FORMATS))}; upgrade rankfold, or load with trust_remote_code=True to use the "
                "code beside the weights"
            )
        install_described(model, self.quantization_config)

    def get_weight_conversions(self):
        """Called by transformers' loader: names of an earlier format, as :func:`current_name` changes them."""
        if self.quantization_config.fields.get("format") != 1:
            return []
        return [WeightRenaming(pattern, now) for pattern, now in _FACTORS.items()]

    def _process_model_after_weight_loading(self, model: Any, **kwargs):
        if self.quantization_config.fields.get("format") != FORMAT:
            # The model is of this format now; transformers would rename its tensors back where it saves.
            self.quantization_config.fields["format"] = FORMAT
            changes = model._weight_conversions
            model._weight_conversions = [change for change in changes if change.source_patterns[0] not in _FACTORS]
        for name, module in model.named_modules():
            check = getattr(module, "check_indices", None)
            if check is not None and not any(b.is_meta for b in module.buffers()):  # meta: kept on disk
                check(name)
        check_rotation(model)
        attach(model, self.quantization_config, self)
        return model

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return True

    @property
    def is_compileable(self):
        return True


def install_described(model, config: RankfoldConfig) -> None:
    """Swap modules for the ones a config describes, parameters and buffers on the meta device.

    Raises:
        ValueError: what cannot be built, or is not what was written.
    """
    with torch.device("meta"), no_init_weights():  # on the meta device PyTorch initialises in Python
        install(model, config.modules)  # which says what is wrong where it can tell
    if config.fields.get("digest") not in (None, digest(config.modules)):
        raise ValueError("the description of the modules in config.json is not the one that was written")


def check_rotation(model) -> None:
    """Raise :class:`ValueError` where an attention turns more or fewer dimensions than the model's rotary tables do."""
    tables = {buffer.shape[-1] * 2 for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for name, module in model.named_modules():
        if not isinstance(module, CompressedAttention) or not module.rotary_dim or not tables:
            continue
        halves = 2 if isinstance(module, PackedAttention) else 1  # rows and columns of an image turn by the same table
        if module.rotary_dim / halves not in tables:
            raise ValueError(
                f"{name} turns {module.rotary_dim} dimensions, and the model by its config {min(tables)}; config.json "
                "is not the one that was written"
            )


def attach(model, config, quantizer: RankfoldQuantizer | None = None) -> None:
    """Make ``save_pretrained`` of a model whose modules are installed write a checkpoint that loads again.

    Args:
        model: compressed model.
        config: its description, a :class:`RankfoldConfig` or the dict of one.
    """
    if isinstance(config, dict):
        config = RankfoldConfig(**config)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer or RankfoldQuantizer(config)
    # It is an ordinary float model: .half(), .to() and training must not be refused as for integer weights.
    model.is_quantized = False
    model.config._is_quantized = False
    model.save_pretrained = _Saving(model)


class _Saving:
    """The method ``save_pretrained`` of one model, with the function and the model that quantisers look for.

    It is pickled with the model, as a bound method of another name is not.
    """

    def __init__(self, model):
        self.__self__, self.__func__ = model, _save_with_code

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)


def _save_with_code(model, save_directory, *args, push_to_hub=False, **kwargs):
    """``save_pretrained`` that also puts this code beside the weights, where ``auto_map`` looks for it.

    ``push_to_hub`` of transformers' own uploads before the code is there, so the model is pushed afterwards.
    """
    model.config.auto_map = dict(AUTO_MAP)
    hub = {
        name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private") if push_to_hub and name in kwargs
    }
    quantizer, model.hf_quantizer = model.hf_quantizer, None  # beside one, transformers ignores a given state_dict
    try:
        type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        model.hf_quantizer = quantizer
    if os.path.isdir(save_directory):
        Path(save_directory, CODE_FILE).write_text(code(), encoding="utf-8")
    if push_to_hub:
        hub |= {name: kwargs[name] for name in ("token", "max_shard_size") if name in kwargs}
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


class _Remote:
    """What ``auto_map`` names under ``trust_remote_code=True``."""

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Called by transformers on remote classes; the stock class stays registered."""


class RankfoldForCausalLM(_Remote):
    """Entry point of ``trust_remote_code=True``: hands over to the stock class of the model type."""

    @classmethod
    def from_pretrained(cls, path, *args, config=None, **kwargs):
        stock, config = cls._stock(config)
        return stock.from_pretrained(path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config, **kwargs):
        stock, config = cls._stock(config)
        return stock._from_config(config, **kwargs)

    @staticmethod
    def _stock(config):
        """Return what AutoModelForCausalLM takes without this code: a class, and of some models that see the config of
        their language model."""
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise ValueError(
                f"{config.model_type} has no class for AutoModelForCausalLM; load the checkpoint by the Auto class of "
                f"what it names: {', '.join(config.architectures or ())}"
            )
        stock, text = getattr(transformers, name), config.get_text_config()
        if text is not config and stock.config_class is type(text):
            text.quantization_config = config.quantization_config
            return stock, text
        return stock, config


class RankfoldAutoConfig(_Remote):
    """The config under ``trust_remote_code=True``: the stock one.

    That this code then runs, before anybody asks about the method, is the point: lm-eval does so, and a model without
    head has no class of its own here.
    """

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **kwargs)


def _register() -> None:
    """Make the format known to transformers, whether the package or a checkpoint brings this code.

    The package's goes before that of a checkpoint, wherever both are in a process: all else in the package knows its
    own classes only.
    """
    if METHOD_NAME in AUTO_QUANTIZATION_CONFIG_MAPPING and Path(__file__).name == CODE_FILE:
        return
    configs: Any = AUTO_QUANTIZATION_CONFIG_MAPPING
    quantizers: Any = AUTO_QUANTIZER_MAPPING
    for name in METHOD_NAMES:
        configs[name], quantizers[name] = RankfoldConfig, RankfoldQuantizer
    base: Any = PreTrainedModel
    found = base._from_config.__func__
    dense = getattr(found, "builds_dense", found)  # beneath the code of a checkpoint
    made: Any = _structured(dense)
    made.builds_dense = dense
    base._from_config = classmethod(made)


def _structured(dense):
    """``_from_config`` that builds what the config describes.

    There is no hook for it: it would be a dense model, silently.
    """

    @functools.wraps(dense)
    def from_config(cls, config, **kwargs):
        model = dense(cls, config, **kwargs)
        found = getattr(config, "quantization_config", None)
        found = found.to_dict() if isinstance(found, QuantizationConfigMixin) else found
        if isinstance(found, dict) and found.get("quant_method") in METHOD_NAMES:
            description: Any = RankfoldConfig.from_dict(found)
            before = set(model.modules())
            install(model, description.modules)
            _initialise([module for module in model.modules() if module not in before], model)
            model.tie_weights(recompute_mapping=False)
            attach(model, description)
        return model

    return from_config


def _initialise(modules: list[nn.Module], model) -> None:
    """Random numbers for new modules, as far as their own class gives none; indices are as the modules make them."""
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for module in modules:
        if isinstance(module, QuantizedTensor):
            module.reset_parameters(std)
        elif not isinstance(module, nn.Linear):
            for name, parameter in module.named_parameters(recurse=False):
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=std)
        module.to(model.dtype)


_register()
