"""Packages that are installed only by an extra."""

from importlib.util import find_spec

from ..errors import OptionError


def check_gguf() -> None:
    """Raise :class:`OptionError` where GGUF files can be neither read nor written."""
    if find_spec("gguf") is None:
        raise OptionError("GGUF files need gguf, which is not installed; pip install 'rankfold[gguf]'")
