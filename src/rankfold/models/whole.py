"""Models that are read as a whole: GGUF files, and checkpoints stored under other names than the model class uses."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .._utils.reporting import reporting
from ..errors import CheckpointError, UnsupportedModelError, first_line
from .auto_classes import auto_class
from .gguf_config import check_biases, check_size, gguf_config
from .gguf_reader import parsed_once
from .weights import listed, missed

log = logging.getLogger(__name__)

# The report of what was loaded comes back instead of an error that names nothing; no code of a checkpoint is ever run.
REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}


def read_whole(folder: Path, config, dtype: torch.dtype) -> PreTrainedModel:
    """Read a dense model from a folder of safetensors and its config into host memory; its numbers are held in
    ``dtype``.

    Raises:
        CheckpointError: it cannot be read, or does not hold what its config describes.
    """
    auto: Any = auto_class(config)
    with reporting(CheckpointError, f"{folder} cannot be loaded"):
        model, info = auto.from_pretrained(folder, dtype=dtype, use_safetensors=True, **REPORTED)
    check_loaded(info, model, folder)
    untie_where_unequal(model, str(folder))
    return model


def read_gguf(file: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """A GGUF file, de-quantised by transformers; ``dtype``: what its numbers are held in.

    Raises:
        CheckpointError: it cannot be read.
        UnsupportedModelError: see :func:`~.gguf_config.gguf_config`.
    """
    auto: Any = AutoModelForCausalLM
    with parsed_once(), reporting(CheckpointError, f"{file} cannot be read as GGUF", "download or copy it again"):
        config, biases, numbers = gguf_config(file)
        check_size(config, numbers, file)
        model, info = auto.from_pretrained(file.parent, gguf_file=file.name, config=config, dtype=dtype, **REPORTED)
    check_loaded(info, model, file)
    check_biases(model, biases, file)
    untie_where_unequal(model, str(file))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are floats now; save_pretrained refuses otherwise
    model.hf_quantizer = None
    model.is_quantized = False
    return model


def read_config(folder: Path):
    """The config of a folder; none of its code is run.

    Raises:
        CheckpointError: it cannot be read.
        UnsupportedModelError: its class is in code of its own.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged file ends in whatever type the code that meets it raises
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{folder} is of a class that transformers does not have, with code of its own, which is not run; give "
                "a model of a family that transformers has, or, where this is an export for an engine, "
                "the folder it was made from"
            ) from error
        raise CheckpointError(f"{folder} has no readable config.json ({first_line(error)})") from error


def check_answers(config, name: str) -> None:
    """Raise :class:`UnsupportedModelError` where a config has a decoder return tuples: transformers looks for fields in
    what the network in it returns, so such a model computes no logits."""
    if not getattr(config, "return_dict", True):
        raise UnsupportedModelError(
            f"the config of {name} has return_dict false, with which transformers computes no logits; set it to true"
        )


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The settings for generating that lie beside the weights; transformers takes its own where they are damaged.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return None
    with reporting(CheckpointError, f"{path} cannot be read", "correct or remove it"):
        return GenerationConfig.from_pretrained(folder)


def check_loaded(info: dict, model: PreTrainedModel, place: Path, *, only_described: bool = False) -> None:
    """Whether everything a model needs was found, with the right shape: transformers fills in random numbers otherwise.

    Args:
        info: what ``from_pretrained`` reports with ``output_loading_info``.
        only_described: tensors that the model has no place for are an error too, instead of a line in the log.

    Raises:
        CheckpointError: naming the tensors.
    """
    wrong = [f"{n} {list(got)} instead of {list(wanted)}" for n, got, wanted in sorted(info["mismatched_keys"])]
    unused = sorted(info["unexpected_keys"])
    missing, saved, read = sorted(info["missing_keys"]), (model.config.architectures or [None])[0], type(model).__name__
    if missing and saved and saved != read:
        raise CheckpointError(
            f"{place} was saved as {saved} and lacks {listed(missing)}, which {read} has; "
            f"give one that was saved as {read}"
        )
    problems = {"lacks": missing, "has the wrong shape of": wrong}
    refuse_unfit(place, problems | ({"has no use for": unused} if only_described else {}))
    check_unused(unused, model, place)


def check_unused(unused: list[str], model: PreTrainedModel, place: Path) -> None:
    """One line in the log for tensors that the model has no place for.

    Raises:
        CheckpointError: they are weights of its blocks: more blocks, or biases, than the config has.
    """
    refuse_unfit(place, {"leaves out": missed(model, unused)})
    if unused:
        log.warning("%s: tensors that the model has no use for are left out: %s", place, listed(unused))


def refuse_unfit(place: Path, problems: dict[str, list[str]]) -> None:
    """Raise :class:`CheckpointError` where there are names to any of the problems."""
    found = [f"{what} {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"{place} does not fit its config: it {'; it '.join(found)}; correct config.json, "
            "or download or copy it again"
        )


def untie_where_unequal(model: PreTrainedModel, name: str) -> None:
    """Correct the config where it ties the head to the embedding and both are there and differ: they stay two matrices.

    So does transformers; the dense model computes with both.
    """
    if head_differs(model):
        untie(model.config, name)


def check_head(differs: bool, place: Path) -> None:
    """Raise :class:`CheckpointError` where a compressed checkpoint has a head that its config ties to the embedding."""
    if differs:
        raise CheckpointError(
            f"{place} has a head of its own, and its config ties it to the embedding; download or copy it again"
        )


def head_differs(model: PreTrainedModel) -> bool:
    """Tell whether a model has a head of its own where its config ties it to the embedding."""
    head = model.get_output_embeddings()
    # The model's own config decides, as in transformers; that of its language model need not say.
    if head is None or head.weight.is_meta or not getattr(model.config, "tie_word_embeddings", False):
        return False  # of weights on the disk each place has a stand-in of its own
    return head.weight is not model.get_input_embeddings().weight


def untie(config, name: str) -> None:
    """Say in the config that head and embedding are two matrices, and in the log that this was corrected."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part.tie_word_embeddings = False
    log.warning("%s: the head differs from the embedding it should be tied to; both are kept, untied", name)
