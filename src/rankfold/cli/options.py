"""Options that several commands share: one definition of each, in groups that commands take as one parameter."""

import functools
import inspect
import math
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from ..errors import OptionError
from ..methods import make_method, method_class

if TYPE_CHECKING:
    from ..methods import Method

__all__ = [
    "Device",
    "Dtype",
    "Field",
    "Json",
    "MethodOptions",
    "Model",
    "Moments",
    "Part",
    "Parts",
    "Revision",
    "Written",
    "at_revision",
    "expanded",
    "like",
]

Model = Annotated[
    str, typer.Argument(help="Hub id (owner/name or owner/name@revision), local folder, or local .gguf file.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id, as owner/name@revision has it.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
Written = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="What the result is written in: auto (as stored; .gguf: bfloat16), float32, bfloat16 or float16.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
Field = Annotated[
    str,
    typer.Option(help="Column with the text, of a file with rows; with images, for .parquet: image by default."),
]
Part = Annotated[
    str | None,
    typer.Option(
        help="Of a model with several parts: language, vision or projector. Default: the one that writes text, or the only one."
    ),
]
Parts = Annotated[
    str | None,
    typer.Option(help="Both parts of a model in one run, each with its own sparsity, e.g. language=0.3,vision=0.2."),
]
TasksFrom = Annotated[
    str | None, typer.Option(help="Folder with the tasks' rows as NAME.jsonl or NAME_*.jsonl, instead of the hub.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first N windows of a text, the first N questions of a task.")]
Moments = Annotated[Path | None, typer.Option(help="Folder written by `rankfold calibrate`; no calibration then.")]


@dataclass(frozen=True)
class MethodOptions:
    """What is done to a model."""

    sparsity: Annotated[float, typer.Option(help="Fraction of the weights to remove, in [0, 1).")] = 0.3
    method: Annotated[
        str, typer.Option("--method", help="rankfold, modegpt or latentllm; `rankfold methods` lists the others.")
    ] = "rankfold"
    scope: Annotated[
        str, typer.Option(help="What --sparsity counts: the linear weights of the blocks, or the whole model.")
    ] = "blocks"
    budget: Annotated[
        str,
        typer.Option(
            help="What --sparsity is a fraction of: parameters, bytes (bytes:context=4096,batch=8 counts a cache too), "
            "flops:context=2048 (multiply-accumulates per token), or latency:context=2048 (measured here)."
        ),
    ] = "parameters"
    modules: Annotated[
        str | None,
        typer.Option(
            help="Modules to compress, e.g. mlp,qk,vo; or with own sparsities: mlp=0.35,vo=0.2. Default: all."
        ),
    ] = None
    allocation: Annotated[
        str | None,
        typer.Option(
            help="uniform, influence, influence-modules, owl (owl:threshold=5,spread=0.08), spectrum or measured. Default: the "
            "method's."
        ),
    ] = None
    rank_multiple: Annotated[int, typer.Option(help="Ranks are multiples of this.")] = 8
    target: Annotated[
        str,
        typer.Option(
            "--for",
            help="What is to run the result: transformers, vllm, llama.cpp, or stock (exported, any engine). Ranks are those "
            "that need no padding there.",
        ),
    ] = "transformers"
    exclude_blocks: Annotated[str, typer.Option(help="Blocks left dense, e.g. 0,-1.")] = ""
    option: Annotated[list[str] | None, typer.Option(help="Option of the method, KEY=VALUE; repeatable.")] = None

    def parse(self) -> "Method":
        """The method the options describe.

        Raises:
            OptionError: an option that does not parse or is out of range.
        """
        names = ("sparsity", "scope", "budget", "rank_multiple", "target")
        own = {f.name for f in fields(method_class(self.method))}
        shared = {name: getattr(self, name) for name in names if name in own} | {"modules": parse_modules(self.modules)}
        allocation = "uniform" if self.allocation is None and self.target == "stock" else self.allocation
        shared |= {"allocation": allocation} if allocation is not None else {}
        try:
            shared["exclude_blocks"] = tuple(int(b) for b in self.exclude_blocks.split(",") if b)
        except ValueError:
            raise OptionError(
                f"--exclude-blocks takes block numbers such as 0,-1; got {self.exclude_blocks!r}"
            ) from None
        return make_method(self.method, **shared, **_parse_options(self.method, self.option or []))


def at_revision(model: str, revision: str | None) -> str:
    """Return the name of a model with the revision in it.

    Raises:
        OptionError: the model lies here, or names a revision itself.
    """
    if revision is None:
        return model
    if Path(model).expanduser().exists():
        raise OptionError(f"--revision is of a hub id, and {model!r} lies here, got {revision!r}; leave it out")
    from ..models.hub import split_revision

    return "@".join(split_revision(model, revision))


def expanded(command):
    """A command for typer: in place of a parameter that is one of the groups above stand the options of the group."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)}

    @functools.wraps(command)
    def run(**values):
        made = {name: cls(**{f.name: values.pop(f.name) for f in fields(cls)}) for name, cls in groups.items()}
        return command(**values, **made)

    parameters = []
    for name, parameter in signature.parameters.items():
        parameters += _options(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options(group: type) -> list[inspect.Parameter]:
    kind, hints = inspect.Parameter.KEYWORD_ONLY, get_type_hints(group, include_extras=True)
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]


def parse_modules(text: str | None):
    """``mlp,qk`` as names, ``mlp=0.35,vo=0.2`` as sparsities by name.

    Raises:
        OptionError: neither.
    """
    if text is None:
        return None
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts:
        raise OptionError("--modules is empty; e.g. mlp,qk,vo")
    names = [p.split("=", 1)[0].strip() for p in parts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OptionError(f"--modules names {twice[0]!r} more than once; name it once")
    if not any("=" in p for p in parts):
        return tuple(parts)
    try:
        return {name: float(p.split("=", 1)[1]) for name, p in zip(names, parts, strict=True)}
    except (ValueError, IndexError):
        raise OptionError(f"--modules takes mlp,qk,vo or mlp=0.35,vo=0.2 (all with a sparsity); got {text!r}") from None


def _parse_options(method: str, options: list[str]) -> dict:
    from ..methods.base import NarrowingMethod

    cls, shared = method_class(method), {f.name for f in fields(NarrowingMethod)}  # with flags of their own
    defaults = {f.name: f.default for f in fields(cls)}
    parsed = {}
    for item in options:
        key, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"--option takes KEY=VALUE, got {item!r}")
        if key in shared:
            flag = "for" if key == "target" else key
            raise OptionError(
                f"{key!r} is an option of every method: give it as --{flag.replace('_', '-')}, not as --option {item}"
            )
        if key in parsed:
            raise OptionError(f"--option gives {key!r} more than once; give it once")
        parsed[key] = like(defaults.get(key), value, item)
    return parsed


def like(default, value: str, item: str, flag: str = "--option"):
    """``value`` as the type of the option's default; ``item`` of ``flag`` is what was given."""
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise OptionError(f"{flag} {item!r}: expected true or false")
        return value.lower() == "true"
    if isinstance(default, int | float):
        try:
            number = type(default)(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            kind = "number" if isinstance(default, float) else "whole number"
            raise OptionError(f"{flag} {item!r}: expected a finite {kind}")
        return number
    return value
