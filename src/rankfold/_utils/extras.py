"""What not every install has."""

import importlib.util

from ..errors import OptionError

EXTRAS = {  # module -> its package, and the extra of rankfold that installs it
    "PIL": ("Pillow", "images"),
    "gguf": ("gguf", "gguf"),
    "jinja2": ("jinja2", "report"),
    "lm_eval": ("lm-eval", "tasks"),
    "matplotlib": ("matplotlib", "report"),
    "peft": ("peft", "recover"),
}


def require(module: str, what: str, otherwise: str = "") -> None:
    """Raise :class:`OptionError` where a module of an extra is not installed.

    Args:
        what: needs it, as the caller knows it.
        otherwise: what can be done without it.
    """
    package, extra = EXTRAS[module]
    if importlib.util.find_spec(module) is None:
        instead = f", or {otherwise}" if otherwise else ""
        raise OptionError(f"{what} needs {package}, which is not installed; pip install 'rankfold[{extra}]'{instead}")
