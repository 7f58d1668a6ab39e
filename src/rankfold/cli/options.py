"""Options that several commands share: one definition of each, in groups that commands take as one parameter."""

import contextlib
import functools
import inspect
import math
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from ..architectures import PARTS
from ..calibration.hub import HUB
from ..errors import DataError, OptionError
from ..methods import Method, make_method
from ..methods.base import method_class

__all__ = [
    "CalibrationOptions",
    "Device",
    "Dtype",
    "Field",
    "Json",
    "MethodOptions",
    "Model",
    "Moments",
    "Part",
    "Parts",
    "Written",
    "expanded",
    "like",
]

SHARED = {f.name for f in fields(Method)}  # options with a flag of their own

Model = Annotated[str, typer.Argument(help="Hub id, local folder, or local .gguf file.")]
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
    typer.Option(help="Column with the text, for .jsonl and .parquet; with images, for .parquet: image by default."),
]
Part = Annotated[
    str | None,
    typer.Option(
        help="Of a model with two parts: language or vision. Default: the one that writes text, or the only one."
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
    method: Annotated[str, typer.Option("--method", help="Compression method.")] = "rankfold"
    of: Annotated[
        str, typer.Option(help="What --sparsity counts: the linear weights of the blocks, or the whole model.")
    ] = "blocks"
    budget: Annotated[
        str,
        typer.Option(
            help="What --sparsity is a fraction of: parameters, bytes, flops (multiply-accumulates per token), or latency "
            "(time of a forward, measured here)."
        ),
    ] = "parameters"
    context: Annotated[
        int, typer.Option(help="Tokens of the sequence that flops and latency are counted on; clamped to the model's.")
    ] = 2048
    modules: Annotated[
        str | None,
        typer.Option(
            help="Modules to compress, e.g. mlp,qk,vo; or with own sparsities: mlp=0.35,vo=0.2. Default: all."
        ),
    ] = None
    allocation: Annotated[
        str | None,
        typer.Option(
            help="uniform, influence, influence-modules, owl, spectrum or measured; methods that remove blocks have their own. "
            "Default: the method's."
        ),
    ] = None
    epsilon: Annotated[
        float | None, typer.Option(help="Temperature of the influence allocations. Default: the 0.8 rule.")
    ] = None
    outlier: Annotated[
        float, typer.Option(help="Of --allocation owl: times the mean of its block that makes a weight an outlier (M).")
    ] = 5.0
    spread: Annotated[float, typer.Option(help="Of --allocation owl: half of what blocks may differ by (lambda).")] = (
        0.08
    )
    multiple: Annotated[int, typer.Option(help="Ranks are multiples of this.")] = 8
    target: Annotated[
        str,
        typer.Option(
            "--for",
            help="What is to run the result: transformers, vllm, llama.cpp, or stock (exported, any engine). Ranks are those "
            "that need no padding there.",
        ),
    ] = "transformers"
    protect: Annotated[str, typer.Option(help="Blocks left dense, e.g. 0,-1.")] = ""
    option: Annotated[list[str] | None, typer.Option(help="Option of the method, KEY=VALUE; repeatable.")] = None

    def parse(self) -> Method:
        """The method the options describe.

        Raises:
            OptionError: an option that does not parse or is out of range.
        """
        names = ("sparsity", "of", "budget", "context", "epsilon", "outlier", "spread", "multiple", "target")
        shared = {name: getattr(self, name) for name in names} | {"modules": _parse_modules(self.modules)}
        allocation = "uniform" if self.allocation is None and self.target == "stock" else self.allocation
        shared |= {"allocation": allocation} if allocation is not None else {}
        try:
            shared["protect"] = tuple(int(b) for b in self.protect.split(",") if b)
        except ValueError:
            raise OptionError(f"--protect takes block numbers such as 0,-1; got {self.protect!r}") from None
        return make_method(self.method, **shared, **_parse_options(self.method, self.option or []))


@dataclass(frozen=True)
class CalibrationOptions:
    """What text, or which images, a model is measured on."""

    calibration: Annotated[
        list[str],
        typer.Option(
            help="wikitext2, ptb, c4, alpaca (from the hub, or ALIAS:FILE for a local copy of the rows), a "
            ".txt/.jsonl/.parquet file, pydoc (ships with Python), or self (text the model writes). Repeatable: texts are "
            "mixed in equal parts, or by TEXT=SHARE, e.g. a.txt=0.7 (a file of that very name is taken as the file). For a "
            "part that takes images: a folder of images, or a .parquet file. For a model of images and text, either part: a "
            ".jsonl file with the columns text or question, image (a path from there, or several) and perhaps answer, or "
            "hub:OWNER/NAME, a data set with such columns. With --parts: one of these for both, or PART=TEXT for each, e.g. "
            "language=wikitext2 and vision=images/."
        ),
    ] = ("wikitext2",)
    samples: Annotated[int, typer.Option(help="Calibration windows of all texts together, or images, or examples.")] = (
        128
    )
    length: Annotated[
        int, typer.Option(help="Tokens per window; clamped to the model's context. Examples are not cut.")
    ] = 2048
    seed: Annotated[int, typer.Option(help="Order in which windows are drawn.")] = 0
    field: Field = "text"

    def of_parts(self) -> dict[str, "CalibrationOptions"]:
        """What each part of a model is measured on.

        Raises:
            OptionError: not one file of image-text examples for all, and not something for each.
        """
        named = [(part, text) for part, equals, text in (text.partition("=") for text in self.calibration) if equals]
        texts = {name: [text for part, text in named if part == name] for name in PARTS}
        if sum(map(len, texts.values())) == len(self.calibration) and all(texts.values()):
            # A column is one of the text; images are in the one that is called so.
            return {name: replace(self, calibration=given, field=self._field_of(name)) for name, given in texts.items()}
        only = self.calibration[0].lower()
        if len(self.calibration) == 1 and not any(texts.values()) and (only.endswith(".jsonl") or only.startswith(HUB)):
            return {name: replace(self, field=self._field_of(name)) for name in PARTS}
        raise OptionError(
            "with --parts, --calibration takes one .jsonl file of image-text examples (or hub:OWNER/NAME), or PART=... for "
            f"each, e.g. --calibration language=wikitext2 --calibration vision=images/; got {' and '.join(self.calibration)}"
        )

    def _field_of(self, part: str) -> str:
        return "text" if part == "vision" else self.field

    def load(self, source):
        """The windows, images or examples; see :func:`rankfold.load_tokens`, :func:`rankfold.load_images` and
        :func:`rankfold.load_examples`."""
        if source.part.takes_images:
            return self._images(source)
        from ..calibration.examples import has_images

        texts = _parse_texts(self.calibration)
        if any(has_images(name, source) for name in texts):
            return self._examples(source)
        from ..calibration.tokens import load_tokens

        options = {"samples": self.samples, "length": self.length, "seed": self.seed, "field": self.field}
        return load_tokens(texts, source, **options)

    def _examples(self, source):
        from ..calibration.examples import load_examples

        if len(self.calibration) != 1:
            raise OptionError(
                f"--calibration takes one file of image-text examples and nothing beside it, got {len(self.calibration)}; put "
                "them into one"
            )
        return load_examples(
            *_parse_texts(self.calibration), source, samples=self.samples, seed=self.seed, field=self.field
        )

    def _images(self, source):
        from ..calibration.images import load_images

        if len(self.calibration) != 1:
            raise OptionError(
                f"--calibration takes one folder of images, got {len(self.calibration)}; put them into one"
            )
        field = "image" if self.field == "text" else self.field
        return load_images(self.calibration[0], source, samples=self.samples, seed=self.seed, field=field)


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


def _parse_modules(text: str | None):
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


def _parse_texts(texts: list[str]) -> list[str] | dict[str, float]:
    """Names of texts, or name -> share where they are given as ``TEXT=SHARE``."""
    from ..calibration.mixing import check_distinct

    parsed = [_parse_share(text) for text in texts]
    names = [name for name, _ in parsed]
    if all(share is None for _, share in parsed):
        return names
    if any(share is None for _, share in parsed):
        raise OptionError(
            f"--calibration takes a share for every text or for none, e.g. a.txt=0.7 and b.txt=0.3; got {' and '.join(texts)}"
        )
    check_distinct(names, names)
    return dict(parsed)


def _parse_share(text: str) -> tuple[str, float | None]:
    """``a.txt=0.7`` in parts, unless a text has that very name."""
    from ..calibration.text import text_source

    name, _, share = text.rpartition("=")
    if not name:
        return text, None
    try:
        text_source(text)
    except DataError:
        with contextlib.suppress(ValueError):
            return name, float(share)
    return text, None


def _parse_options(method: str, options: list[str]) -> dict:
    cls = method_class(method)
    defaults = {f.name: f.default for f in fields(cls)}
    parsed = {}
    for item in options:
        key, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"--option takes KEY=VALUE, got {item!r}")
        if key in SHARED:
            flag = "for" if key == "target" else key
            raise OptionError(f"{key!r} is an option of every method: give it as --{flag}, not as --option {item}")
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
