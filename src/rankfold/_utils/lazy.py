"""Names of a package that are imported when they are first used (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def importing(
    package: str, names: Mapping[str, str], namespace: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        names: public name -> ``module`` or ``module:name`` there, relative to the package.
        namespace: the package's ``globals()``; a name is stored there when it has been imported.
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, other = names[name].partition(":")
        namespace[name] = getattr(importlib.import_module(module, package), other or name)
        return namespace[name]

    def dir_() -> list[str]:
        return sorted(namespace.keys() | names)

    return getattr_, dir_
