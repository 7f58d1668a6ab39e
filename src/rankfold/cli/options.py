"""Options that several commands share: one definition of each, in groups that commands take as one parameter."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from ..errors import OptionError
from ..methods import make_method, method_class, method_names
from .rules import Excludes, MayBePath, Needs

if TYPE_CHECKING:
    from ..methods import Method

# One for each panel of the help pages, in the order in which they are shown.
PANELS = ("Model", "Method", "Calibration", "Training", "Measurements", "Output", "Advanced")
of_model, of_method, of_calibration, of_training, of_measurements, of_output, advanced = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)

Model = Annotated[
    str,
    typer.Argument(
        help="Hub id (owner/name or owner/name@revision), local folder, or .gguf file.", rich_help_panel="Model"
    ),
    MayBePath(),
]
Compressed = Annotated[
    str,
    typer.Argument(help="Folder that `rankfold compress` wrote, or its hub id.", rich_help_panel="Model"),
    MayBePath(),
]
Revision = Annotated[str | None, of_model(help="Branch, tag or commit of a hub id, as in owner/name@revision.")]
Device = Annotated[str, of_model(help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str, of_model(help="auto (as stored), float32, bfloat16 or float16.")]
Offload = Annotated[
    str | None,
    advanced(
        metavar="cpu|FOLDER", help="Keep the samples' hidden states in host memory, or in a file there. Same result."
    ),
]
Written = Annotated[str, of_output("--dtype", help="auto (as stored; .gguf: bfloat16), float32, bfloat16 or float16.")]
Component = Annotated[
    str | None, of_model(help="language, vision or projector. Default: the one that writes text, or the only one.")
]
Components = Annotated[
    str | None,
    of_model(help="Several in one run, each with its sparsity: language=0.3,vision=0.2."),
    Excludes(
        ("sparsity", "component", "moments", "recover"),
        "--components compresses several components, each with its own sparsity, {} is of one; leave one of them out",
    ),
]
TargetSize = Annotated[
    str | None,
    of_method(
        metavar="SIZE", help="Instead of --sparsity: all weights, e.g. 400MB, or their GGUF file in a dtype, 80MB:q4_0."
    ),
    Excludes(
        ("sparsity", "keep_quality", "budget", "scope", "components"),
        "--target-size fixes how much of the whole model's bytes is removed, {} would be ignored; "
        "leave one of them out",
    ),
]
KeepQuality = Annotated[
    float | None,
    of_method(
        help="Instead of --sparsity: share of a held-out token's likelihood to keep, e.g. 0.95. Takes two to four runs."
    ),
    Excludes(
        ("sparsity", "components", "recover", "gpu"),
        "--keep-quality finds the sparsity of one component by compressing it, {} cannot be given with it; "
        "leave one out",
    ),
]
Temperature = Annotated[float, typer.Option(help="0: always the most likely token.")]
SamplingSeed = Annotated[int, typer.Option("--seed", help="Seed of the sampling."), Needs(("temperature",))]
Json = Annotated[bool, of_output("--json", help="Print the result as one JSON object on stdout.")]
IncludePath = Annotated[
    str | None,
    of_measurements(help="Folder with the tasks' rows as NAME.jsonl or NAME_*.jsonl, instead of the hub."),
    MayBePath(),
    Needs(("tasks", "generation")),
]
Limit = Annotated[
    int | None,
    of_measurements(help="Only the first N samples of a text, N questions of a task, N prompts of a kind."),
    Needs(("text", "tasks", "generation")),
]
Generation = Annotated[
    bool,
    of_measurements(
        "--generation", help="What it writes: exact answers, repetition, tokens that equal the dense model's."
    ),
]
Moments = Annotated[
    Path | None,
    of_calibration(help="Folder written by `rankfold calibrate`, in place of a calibration."),
    Excludes(
        ("calibration", "num_samples", "max_length", "seed", "text_column", "shards", "mode", "offload"),
        "--moments is one pass over text that is measured already, {} would be ignored; leave one of them out",
        agrees=("mode", "one-pass"),
    ),
]


@dataclass(frozen=True)
class MethodOptions:
    """What is done to a model."""

    panel: ClassVar = "Method"

    sparsity: Annotated[
        float | None,
        typer.Option(help="Fraction of the weights to remove, in [0, 1). Default: the method's, mostly 0.3."),
    ] = None
    method: Annotated[
        str,
        typer.Option(
            help="rankfold, modegpt or latentllm; `rankfold methods` lists the others.", autocompletion=method_names
        ),
    ] = "rankfold"
    modules: Annotated[
        str | None, typer.Option(help="mlp,qk,vo, or each with its sparsity: mlp=0.35,vo=0.2. Default: all.")
    ] = None
    target: Annotated[
        str, typer.Option(help="Choose ranks that run unpadded in transformers, vllm, llama.cpp or stock (any engine).")
    ] = "transformers"
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the method (`rankfold methods NAME`). Repeatable."),
    ] = None
    allocation: Annotated[
        str | None,
        advanced(
            help="uniform, influence, owl:threshold=5,spread=0.08, spectrum, measured, ... Default: the method's."
        ),
    ] = None
    scope: Annotated[str, advanced(help="--sparsity counts the linear weights of the blocks, or the whole model.")] = (
        "blocks"
    )
    budget: Annotated[
        str, advanced(help="parameters, bytes:context=4096,batch=8 (with a cache), flops:context=2048, or latency.")
    ] = "parameters"
    rank_multiple: Annotated[int, advanced(help="Ranks are multiples of this.")] = 8
    exclude_blocks: Annotated[str, advanced(help="Blocks left dense, e.g. 0,-1.")] = ""

    def parse(self) -> "Method":
        """Return the method that the options describe.

        Raises:
            OptionError: an option that does not parse or is out of range.
        """
        own = {field.name for field in fields(method_class(self.method))} - {"settings"}
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name in own}
        for name in ("sparsity", "allocation"):  # which are the method's own by default
            if options[name] is None:
                del options[name]
        if self.allocation is None and self.target == "stock":
            options["allocation"] = "uniform"
        options["modules"] = parse_modules(self.modules)
        try:
            options["exclude_blocks"] = tuple(int(b) for b in self.exclude_blocks.split(",") if b)
        except ValueError:
            raise OptionError(
                f"--exclude-blocks takes block numbers such as 0,-1; got {self.exclude_blocks!r}"
            ) from None
        return make_method(self.method, **options, **_parse_settings(self.method, self.settings or []))


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

    name, at = split_revision(model, revision)
    return f"{name}@{at}"


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer: a parameter that is one of the groups above becomes the options of that group."""
    signature = inspect.signature(command, eval_str=True)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        return command(**_grouped(hints, values))

    parameters = [*_options(hints, defaults)]
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options(hints: dict[str, Any], defaults: dict[str, Any], panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Yield every option, those of groups among them, in the panel of its group where it names none."""
    for name, hint in hints.items():
        if is_dataclass(hint):
            yield from _options(hints_of(hint), _defaults(hint), getattr(hint, "panel", None))
            continue
        if panel is not None:
            info = hint.__metadata__[0]
            info.rich_help_panel = info.rich_help_panel or panel
        default = defaults.get(name, inspect.Parameter.empty)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def hints_of(group: Any) -> dict[str, Any]:
    """Return the annotation of every option of a group."""
    found = get_type_hints(group, include_extras=True)
    return {field.name: found[field.name] for field in fields(group)}


def _defaults(group: Any) -> dict[str, Any]:
    found = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(group)}
    return {name: value for name, value in found.items() if value is not MISSING}


def _grouped(hints: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command, or of a group, out of the values of all options."""
    return {
        name: hint(**_grouped(hints_of(hint), values))
        if isinstance(hint, type) and is_dataclass(hint)
        else values[name]
        for name, hint in hints.items()
    }


def parse_modules(text: str | None):
    """Parse modules: ``mlp,qk`` as names, ``mlp=0.35,vo=0.2`` as sparsities by name.

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


def _parse_settings(method: str, settings: list[str]) -> dict:
    from ..methods.base import NarrowingMethod

    cls, shared = method_class(method), {f.name for f in fields(NarrowingMethod)}  # with flags of their own
    defaults = {f.name: f.default for f in fields(cls)}
    parsed = {}
    for item in settings:
        key, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"--set takes KEY=VALUE, got {item!r}")
        if key in shared:
            flag = key.replace("_", "-")
            raise OptionError(f"{key!r} is an option of every method: give it as --{flag}, not as --set {item}")
        if key in parsed:
            raise OptionError(f"--set gives {key!r} more than once; give it once")
        parsed[key] = parse_as(defaults.get(key), value, item)
    return parsed


def parse_as(default, value: str, item: str, flag: str = "--set"):
    """Return ``value`` in the type of an option's default; ``item`` of ``flag`` is what was given."""
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
