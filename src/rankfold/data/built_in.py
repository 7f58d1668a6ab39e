"""Texts that are known by name and lie on no hub: what ships with Python, and mixtures of named texts."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

SOURCE_CODE = "python-source"
DEFAULT_TEXT = "mixture"
# Texts of several kinds with their shares: a model that is calibrated on one kind loses the others.
MIXTURES = {DEFAULT_TEXT: {"wikitext2": 0.35, "c4": 0.3, SOURCE_CODE: 0.25, "languages": 0.1}}
# Folders of the standard library that hold other projects, tests, tables of characters, or the text of `pydoc`.
SKIPPED = {
    *("site-packages", "dist-packages", "ensurepip", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}


def _topics() -> Iterator[str]:
    """Yield the language reference."""
    from pydoc_data.topics import topics

    return (topics[key] for key in sorted(topics))


def _standard_library() -> Iterator[str]:
    """Yield the modules of the interpreter's standard library (PSF licence), by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(folder): path for path in folder.rglob("*.py")}
    for name in sorted(files, key=Path.as_posix):
        if not SKIPPED & {*name.parts} and not name.name.startswith("_sysconfigdata"):  # paths of this machine
            yield files[name].read_text(encoding="utf-8", errors="replace")


BUILT_IN: dict[str, Callable[[], Iterable[str]]] = {"pydoc": _topics, SOURCE_CODE: _standard_library}
