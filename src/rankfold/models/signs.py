"""What the names and dtypes of a model's tensors show: that it is quantised, wrapped, or carries an adapter."""

import re
from collections.abc import Mapping

from torch import Tensor

from .._utils.present import present
from .._utils.sizes import plural
from ..errors import UnsupportedModelError
from .listing import MERGE

# By default it is written quantised again, without its config.
SAVED = "save_pretrained(OUT, save_original_format=False)"
QUANTISED = (  # names that quantisers give to what lies beside a weight or in its place
    ("bitsandbytes", r"\.(SCB|(nested_)?absmax|(nested_)?quant_map|quant_state\.\w+)$"),
    ("GPTQ or AWQ", r"\.(qweight|qzeros|g_idx)$"),
    ("compressed-tensors", r"\.weight_(packed|shape|zero_point|g_idx)$"),
    ("MXFP4", r"_blocks$"),
    ("float8 or int8 with scales", r"(\.weight_scales?|_scale_inv|\.weight_scale_2)$"),
    ("HQQ", r"\.W_q$"),
    ("quanto", r"\.weight\._(data|scale)$"),
)
FEW_BITS = re.compile(r"F[468](_|$)|[IU](4|8|16|32)$")  # floats of few bits, and integers that packed numbers lie in
WRAPPED = (
    (
        "is wrapped by peft, its adapter not merged",
        r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save|original_module)\."
        r"|^base_model\.model\.",
        MERGE,
    ),
    (
        "was compiled by torch.compile",
        r"(^|\.)_orig_mod\.",
        "give or save the model as it was before (model._orig_mod), or take '_orig_mod.' out of the names of its "
        "tensors",
    ),
    (
        "was wrapped by FSDP or by activation checkpointing",
        r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|_flat_param$",
        "save it with accelerator.get_state_dict, or trainer.save_model with a full state dict",
    ),
)


def kind_of(tensor: Tensor) -> str:
    """Return the dtype of a tensor as safetensors names it, e.g. F32, F8_E4M3, I8; of bf16 BF16."""
    name = str(tensor.dtype).removeprefix("torch.")
    letters, bits = present(re.match(r"([a-z]+)(\d*)", name)).groups()
    return {"bfloat": "BF", "float": "F", "int": "I", "uint": "U"}.get(letters, letters) + bits


def check_names(names: list[str], place: str) -> None:
    """Raise :class:`UnsupportedModelError` where names of tensors are those of something around a model."""
    for what, pattern, to_do in WRAPPED:
        if found := next((name for name in names if re.search(pattern, name)), None):
            raise UnsupportedModelError(f"{place} {what} ({found}); {to_do}")
    if names and all(name.startswith("module.") for name in names):
        raise UnsupportedModelError(
            f"{place} was wrapped by DataParallel, DDP or DeepSpeed ({names[0]}); save the model in it (model.module), "
            "or take 'module.' off the names of its tensors"
        )


def check_numbers(kinds: Mapping[str, str], place: str) -> None:
    """Raise :class:`UnsupportedModelError` where tensors, by name and :func:`kind_of`, are of a quantised model."""
    found = next(((name, what) for what, pattern in QUANTISED for name in kinds if re.search(pattern, name)), None)
    found = found or _of_few_bits(kinds)
    if found:
        raise UnsupportedModelError(
            f"{place} is quantised ({found[1]}: {found[0]}), and its config has no quantization_config; start from the "
            f"dense model, or, where transformers has de-quantised it, save it again with {SAVED}"
        )


def check_filled(shapes: Mapping[str, tuple[int, ...]], place: str) -> None:
    """Raise :class:`UnsupportedModelError` where vectors have no entries."""
    if found := [name for name, shape in shapes.items() if tuple(shape) == (0,)]:
        raise UnsupportedModelError(
            f"{place} has {plural(len(found), 'tensor')} without entries ({found[0]}), as DeepSpeed's ZeRO-3 leaves "
            "them; gather the weights (zero_to_fp32.py, or stage3_gather_16bit_weights_on_model_save) and save "
            "them again"
        )


def _of_few_bits(kinds: Mapping[str, str]) -> tuple[str, str] | None:
    """Find a tensor of float8, float4 or the like; or integers with scales beside them in the same module."""
    scaled = {name.rpartition(".")[0] for name in kinds if "scale" in name.rpartition(".")[2]}
    for name, kind in kinds.items():
        if FEW_BITS.match(kind) and (kind.startswith("F") or name.rpartition(".")[0] in scaled):
            return name, kind
    return None
