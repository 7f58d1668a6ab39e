"""Types of the arguments of public functions, checked against their annotations before anything runs."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..errors import OptionError, suggestion

OF_TORCH = ("dtype", "device")  # arguments that are names, or what PyTorch has of these names
PLACES = ("output", "folder", "moments", "cache_logits", "offload_folder")  # may be paths, where `~` is the home
P = ParamSpec("P")
T = TypeVar("T")

# What a type is called in a message, and where an object of it comes from.
NAMES = {
    "CalibrationData": "calibration data (rankfold.load_calibration)",
    "Method": "a method (rankfold.make_method)",
    "Module": "a PyTorch module",
    "MomentStore": "moments (rankfold.calibrate)",
    "NoneType": "None",
    "Path": "a pathlib.Path",
    "PreTrainedModel": "a transformers model",
    "DenseModel": "an open model (rankfold.open_model)",
    "CompressionResult": "a result (rankfold.compress)",
    "Tensor": "a tensor",
    "bool": "True or False",
    "float": "a number",
    "int": "a whole number",
    "str": "a str",
}


def typed(function: Callable[P, T], called: str = "", /, **hints: object) -> Callable[P, T]:
    """Wrap a public function: an argument that is not of its annotated type is refused in one line.

    Args:
        function: with annotations.
        called: the name that callers know it by; that of ``function`` by default.
        hints: types of arguments whose annotation cannot name them, because their module lies further up.

    Returns:
        A function that raises :class:`OptionError` for a wrong type, and otherwise calls ``function``, without the
        modes of PyTorch that the caller is in.
    """
    signature = inspect.signature(function)
    variable = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    named = {name: hint for name, hint in function.__annotations__.items() if name not in {"return", *variable, *hints}}
    annotated = types.SimpleNamespace(__annotations__=named)  # what it returns may have a name for type checkers only
    wanted = typing.get_type_hints(annotated, function.__globals__) | hints

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            names = (name for name in kwargs if name not in signature.parameters)
            unknown = next((name for name in names if repr(name) in str(error)), None)
            hint = suggestion(unknown, signature.parameters) if unknown else ""
            raise TypeError(f"{called or function.__name__}(): {error}{hint and f'; {hint.strip()}'}") from None
        bound.arguments.update({name: _named(value) for name, value in bound.arguments.items() if name in OF_TORCH})
        bound.arguments.update({name: _expanded(value) for name, value in bound.arguments.items() if name in PLACES})
        bound.arguments.update({name: _plain(value) for name, value in bound.arguments.items()})
        for name, value in bound.arguments.items():
            if name in wanted and not _is_of(value, wanted[name]):
                raise OptionError(
                    f"{name} must be {_called(wanted[name])}, got {str(value)[:40]!r} of type {type(value).__name__}"
                )
        from .evaluating import own_modes  # and PyTorch with it, which not every caller of this module needs

        with own_modes():
            return function(*bound.args, **bound.kwargs)

    return call


def _plain(value: object) -> object:
    """Return Python's number of a number of NumPy, which is not imported for this; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # pyright: ignore[reportAttributeAccessIssue]
    return value


def _expanded(value: object) -> object:
    """Return a path with the home in the place of `~`; anything else as it is."""
    return type(value)(os.path.expanduser(value)) if isinstance(value, str | Path) else value


def _named(value: object) -> object:
    """Return the name of a dtype or device of PyTorch, which is not imported for this; anything else as it is."""
    kind = type(value)
    is_of_torch = kind.__module__ == "torch" and kind.__name__ in OF_TORCH
    return str(value).removeprefix("torch.") if is_of_torch else value


def _is_of(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type. Items are looked at where that does not use them up."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return True
    if origin is typing.Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, one) for one in inner)
    if origin is None:
        return _is_instance(value, hint)
    if not isinstance(value, origin) or (isinstance(value, str) and origin is Sequence):
        return False
    if origin is tuple:  # what takes several things together looks at them itself
        return True
    if isinstance(value, Mapping):
        return all(_is_of(key, inner[0]) and _is_of(item, inner[1]) for key, item in value.items())
    return not isinstance(value, Sequence | Set) or all(_is_of(item, inner[0]) for item in value)


def _is_instance(value: object, hint: type) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _called(hint: Any) -> str:
    """Name a type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        *most, last = [_called(one) for one in inner]
        return f"{', '.join(most)} or {last}"
    if origin is Callable:
        return "a function"
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is not None:
        joint = " to " if issubclass(origin, Mapping) else ", "
        return f"{origin.__name__.lower()} of {joint.join(_called(one) for one in inner)}"
    return NAMES.get(hint.__name__, f"a {hint.__name__}")
