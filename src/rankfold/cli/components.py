"""`--components`: several components of a model in one command."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ..errors import OptionError, check_choice
from .calibration import CalibrationOptions
from .options import MethodOptions

if TYPE_CHECKING:
    from ..methods import Method

__all__ = ["methods_of_components", "opened_components"]


def methods_of_components(sparsities: str, what: MethodOptions, config: list[dict] | None) -> "dict[str, Method]":
    """Return what is done to each component.

    Args:
        sparsities: of ``--components``, e.g. ``language=0.3,vision=0.2``.
        config: settings of each component of an earlier run.

    Raises:
        OptionError: not sparsities of different components, or an option that does not parse.
    """
    methods = {}
    for name, value in _parse(sparsities).items():
        method = _of(name, what, config).parse()
        if method.own_sparsities and not config:
            raise OptionError(
                f"--components gives each component its sparsity, --modules {what.modules} would take its place; name the "
                f"modules only, e.g. --modules {','.join(method.own_sparsities)}"
            )
        methods[name] = replace(method, sparsity=value)
    return methods


def _of(name: str, group, config: list[dict] | None):
    """Return a group of options with the settings of one component."""
    found = next((one for one in config or () if one.get("component") == name), {})
    names = {field.name for field in fields(group)}
    return replace(group, **{key: value for key, value in found.items() if key in names})


def _parse(text: str) -> dict[str, float]:
    from ..architectures import PARTS

    given = [item.partition("=")[::2] for item in text.split(",") if item.strip()]
    names = [name.strip() for name, _ in given]
    for name in names:
        check_choice("component", name, PARTS)
        if names.count(name) > 1:
            raise OptionError(f"--components names {name!r} more than once; name it once")
    try:
        found = {name: float(value) for name, (_, value) in zip(names, given, strict=True)}
    except ValueError:
        raise OptionError(
            f"--components takes a sparsity for each, e.g. language=0.3,vision=0.2; got {text!r}"
        ) from None
    if len(found) < 2:
        raise OptionError(
            f"--components takes two components or more, e.g. language=0.3,vision=0.2; got {text!r}; for one of them give "
            "--component and --sparsity"
        )
    return found


def opened_components(
    model: str,
    methods: "dict[str, Method]",
    text: CalibrationOptions,
    config: list[dict] | None,
    dtype: str,
    device: str,
) -> list[tuple]:
    """Return each component of a model, what is done to it, and what it is calibrated on."""
    from ..architectures import PARTS
    from ..compression.validate_spec import validated
    from ..models.opening import open_model

    names = [name for name in PARTS if name in methods]
    recorded = {one.get("component") for one in config or () if "calibration" in one}
    texts = {name: _of(name, text, config) for name in names} if recorded >= {*names} else text.of_parts(names)
    sources = [validated(open_model(model, dtype=dtype, device=device, component=name)) for name in texts]
    for source in sources:
        methods[source.part.name].supported_modules(source.architecture, source.meta_block(0))
    return [(source, methods[source.part.name], texts[source.part.name].load(source)) for source in sources]
