"""One batch through the network of an open model."""

import inspect
from collections.abc import Mapping

from torch import Tensor

# What a config may have the model return beside; blocks that are passed by return none of it.
BESIDE = ("output_attentions", "output_hidden_states", "output_router_logits")


def forward(source, batch: Tensor | Mapping[str, Tensor], **options):
    """Return what the network of a model makes of a batch.

    Args:
        source: an open model.
        batch: ``(B, T)`` token ids, or ``(B, C, H, W)`` pixels as its image processor gives them; or all inputs by
            name, as the processor of a model of images and text gives them, or as a tower for images of any size takes
            them.
        options: of the network's own forward.
    """
    part = source.part
    options |= {"use_cache": False} if part.architecture.decoder else {}
    options |= {name: False for name in BESIDE if getattr(source.network.config, name, False)}
    options |= {} if getattr(source.network.config, "return_dict", True) else {"return_dict": True}
    given = {part.input_name: batch} if isinstance(batch, Tensor) else batch
    given = {name: tensor.to(source.device) for name, tensor in given.items()}
    if part.architecture.is_projector and not part.packed:  # Qwen-VL's tower has its projector inside
        return _project(source.network, **given)
    return source.network(**given, **options)


def _project(network, pixel_values: Tensor):
    """Send images through the tower before a projector. Some ask for the sizes of images that were cut into several;
    these were not."""
    see = network.get_image_features
    sizes = inspect.signature(see).parameters.get("image_sizes")
    is_wanted = sizes is not None and sizes.default is inspect.Parameter.empty
    return see(pixel_values, **({"image_sizes": [tuple(x.shape[1:]) for x in pixel_values]} if is_wanted else {}))
