"""`rankfold models`"""

from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import common as c
from . import options as o

if TYPE_CHECKING:
    from ..architectures import Architecture, AttentionSpec, NamedModel


def command(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id or .gguf file to look at.", rich_help_panel="Model")
    ] = None,
    component: o.Component = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """List the models and what can be compressed, or look at one.

    For a family that is not listed, the spec is derived from the blocks and checked on the weights. The output can be
    put into a file of rankfold as it is.

    \b
    rankfold models
    rankfold models path/to/model
    """
    if model is None and revision is not None:
        raise OptionError(f"--revision {revision} would be ignored without a model; name one, or leave it out")
    if model is not None:
        return _one(o.at_revision(model, revision), component, json)
    rows = rows_of_models()
    c.emit({"models": rows}, json, lambda out: out.print(c.table_of(rows)))


def _one(model: str, part: str | None, json: bool) -> None:
    from ..compression.validate_spec import validate_spec
    from ..models.opening import open_model

    source = open_model(model, component=part)
    proof = validate_spec(source) if source.architecture.derived else None
    spec = proof.spec if proof else source.architecture
    numbers = {"logits": proof.logits, "attention": proof.attention, "units": proof.units} if proof else {}
    row = _row(spec)

    def show(out) -> None:
        out.print(", ".join(f"{key} {value}" for key, value in row.items()), soft_wrap=True)
        if not numbers:
            return out.print("its spec comes with rankfold")
        differences = ", ".join(f"{name} {value:.1e}" for name, value in numbers.items() if value is not None)
        out.print("read off its blocks and checked on this model, relative differences: " + differences, soft_wrap=True)
        out.print(code(spec), markup=False, highlight=False, soft_wrap=True)

    c.emit({**row, "spec": code(spec), "differences": numbers or None}, json, show)


def rows_of_models() -> list[dict[str, str]]:
    """Return a row for every component of every model that is known by name."""
    from ..architectures import MODELS

    return [_part_row(model, part, family) for model in MODELS for part, family in model.parts.items()]


def _part_row(model: "NamedModel", part: str, family: str) -> dict[str, str]:
    named = {"model": model.name, "model_type": model.model_type, "component": part, "family": family}
    if part == "projector":
        return named | {"mlp": "units", "qk": "-", "vo": "-"}
    from ..architectures import known_architectures

    known = {architecture.model_type: architecture for architecture in known_architectures()}
    return named | {key: value for key, value in _row(known[family]).items() if key != "model_type"}


def _row(architecture: "Architecture") -> dict[str, str]:
    return {
        "model_type": architecture.model_type,
        "mlp": _mlp(architecture),
        "qk": _form(architecture.attention),
        "vo": "dense" if architecture.attention.unsupported_reason else "svd",
    }


def _mlp(architecture: "Architecture") -> str:
    experts = architecture.experts
    if experts is None:
        return "units" if architecture.mlp else "dense"
    if architecture.mlp and experts.shared and architecture.mlp.down == experts.shared.down:
        return "units, and of experts where it has them"
    return "units of experts" + (" and of the shared one" if experts.shared else "")


def _form(attention: "AttentionSpec") -> str:
    from ..architectures.spec import ByConfig

    if attention.unsupported_reason:
        return "dense"
    if attention.qk_norm and attention.norm_offset is None:
        return "dense with q/k-norm"
    if attention.qk_norm:
        return "pairs where named, with q/k-norm"
    if isinstance(attention.position, ByConfig):
        return "pairs, or svd where nothing rotates"
    if attention.position != "rope":
        return "svd"
    return "pairs; svd in layers that do not rotate" if attention.applies_rope else "pairs"


def code(spec: Any) -> str:
    """Return the expression that makes a spec, without what is as it is by default."""
    given = {
        f.name: getattr(spec, f.name)
        for f in fields(spec)
        if f.default is MISSING or getattr(spec, f.name) != f.default
    }
    given.pop("derived", None)
    shown = ", ".join(f"{name}={_code(value)}" for name, value in given.items())
    return f"{type(spec).__name__}({shown})"


def _code(value: Any) -> str:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return f"({', '.join(map(code, value))},)"
    return code(value) if is_dataclass(value) and not hasattr(value, "of") else repr(value)
