"""The config of a compressed model."""

from ..architectures import FROM_CONFIG, copied_config, with_fields
from ..modules import AUTO_MAP, FORMAT, METHOD_NAME, digest
from .numbered import cut_model, cut_part


def compressed_config(source, identity: dict, modules: dict[str, dict], kept: tuple[int, ...]):
    """The model's config with the description of the compressed modules in it; without any it is a stock model's.

    Args:
        identity: how it was made.
        modules: path -> description. Those of the family's own class become fields of the config, and are taken out.
        kept: blocks of the source that are in the result, ascending.
    """
    config = copied_config(source.model.config)
    config.architectures = [type(source.model).__name__]
    config.dtype = source.dtype
    if len(kept) < len(source):
        cut_part(_part_of(config, source), kept)
        if source.part.takes_images:
            cut_model(config, len(source), kept)
    for path in [path for path, spec in modules.items() if spec["kind"] == FROM_CONFIG]:
        with_fields(_part_of(config, source), modules.pop(path))
    config.__dict__.pop("auto_map", None)  # to code that is not run, and not beside the result
    before = _described(config)  # of another part
    if modules or before:
        config.auto_map = dict(AUTO_MAP)
    if not modules:
        return config
    modules = before.pop("modules", {}) | modules
    described = {"digest": digest(modules), "modules": modules} | ({"before": before} if before else {})
    config.quantization_config = {"quant_method": METHOD_NAME, "format": FORMAT, **identity, **described}
    return config


def name_dtype(config, dtype) -> None:
    """Write into a config, and into those of its parts, in which dtype the weights are stored."""
    config.dtype = dtype
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        name_dtype(part, dtype)


def _described(config) -> dict:
    """What a config says of an earlier compression; empty where there is none."""
    found = getattr(config, "quantization_config", None) or {}
    found = dict(found if isinstance(found, dict) else found.to_dict())
    return {key: value for key, value in found.items() if key not in ("quant_method", "format", "digest")}


def _part_of(config, source):
    """The config of the source's part in a copy of the model's config."""
    if source.config is source.model.config:
        return config
    names = [name for name in config.sub_configs if getattr(source.model.config, name) is source.config]
    return getattr(config, names[0]) if names else config.get_text_config()
