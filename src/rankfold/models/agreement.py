"""Whether a model in memory is what its config describes.

The result is built from the config: what was changed on the model by hand would be left out of it.
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from .._utils.empty import empty_weights
from ..architectures import copied_config
from ..errors import UnsupportedModelError
from .auto_classes import auto_class
from .weights import listed, tied_names


def check_agrees(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModelError` unless the tensors of a model, and which of them are one, are those that
    transformers makes of its config."""
    config = copied_config(model.config)
    described = config.__dict__.pop("quantization_config", None) or {}  # of a part that was compressed before
    found = described if isinstance(described, dict) else described.to_dict()
    with torch.device("meta"), empty_weights():
        auto = auto_class(config, type(model).__name__)
        outline = auto.from_config(config, attn_implementation="eager", trust_remote_code=False)
    _check_shapes(model, outline, tuple(f"{path}." for path in found.get("modules", ())))
    _check_tied(model, tied_names(outline))


def _check_shapes(model: nn.Module, outline: nn.Module, apart: tuple[str, ...]) -> None:
    """Compare names and shapes; those below the paths ``apart`` are known otherwise."""
    there, wanted = (
        {name: tuple(x.shape) for name, x in some.state_dict().items() if not name.startswith(apart)}
        for some in (model, outline)
    )
    lacking, more = sorted(wanted.keys() - there.keys()), sorted(there.keys() - wanted.keys())
    others = [
        f"{name} {there[name]} instead of {wanted[name]}"
        for name in wanted.keys() & there.keys()
        if there[name] != wanted[name]
    ]
    problems = {"lacks": lacking, "has besides": more, "has": sorted(others)}
    said = [f"it {what} {listed(names)}" for what, names in problems.items() if names]
    if said:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not what its config describes: {'; '.join(said)}; correct model.config, or "
            "change the model back"
        )


def _check_tied(model: PreTrainedModel, wanted: Mapping[str, str]) -> None:
    """Compare which tensors outside the blocks are one: by the config (``wanted``), by what transformers noted when the
    model was made, and by the tensors themselves."""
    state = model.state_dict()
    noted = tied_names(model)
    for name, other in wanted.items():
        if not torch.equal(state[name], state[other]):
            raise UnsupportedModelError(
                f"{name} differs from {other}, and the model's config ties them; set config.tie_word_embeddings=False "
                "and save and load the model, so that both are kept"
            )
    for name, other in _head_of(model).items():
        if name not in wanted and state[name].data_ptr() == state[other].data_ptr() != 0:
            raise UnsupportedModelError(
                f"{name} and {other} are one tensor, and the model's config does not tie them; set "
                "config.tie_word_embeddings=True and save and load the model"
            )
    if changed := sorted(wanted.keys() ^ noted.keys()):
        raise UnsupportedModelError(
            f"{listed(changed)} became tied or untied after the model was made; save and load the model"
        )


def _head_of(model: PreTrainedModel) -> dict[str, str]:
    """Name of the head's weight -> that of the embedding's; empty for an encoder, which may not know its embedding."""
    if (head := model.get_output_embeddings()) is None:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names.get(id(part)) for part in (head, model.get_input_embeddings())]
    return {f"{ends[0]}.weight": f"{ends[1]}.weight"} if all(ends) else {}
