"""Let transformers load compressed checkpoints once rankfold is imported, without importing transformers or PyTorch for
it.

The classes that read a compressed checkpoint (:mod:`rankfold.modules`) are imported when a model is first built, or its
description read.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

# Module -> a class in it, and its class methods that need them: every model is built in one of the first two, and
# programs such as lm-eval read what a config says of quantisation before.
WRAPPED = {
    "transformers.modeling_utils": ("PreTrainedModel", ("from_pretrained", "_from_config")),
    "transformers.quantizers.auto": ("AutoQuantizationConfig", ("from_dict",)),
}


def register_on_first_use() -> None:
    """Wrap the class methods now where transformers is imported already, else as soon as it is."""
    for name in WRAPPED:
        if name in sys.modules:
            _wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name))


class _Finder:  # of importlib.abc only by its method: that module takes a tenth of the time of `rankfold --version`
    """Find one module as Python does, and wrap its class methods when it has been executed."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec and spec.loader
        if loader is None:
            return spec  # Python raises what it does without this finder
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        loader.exec_module = exec_module
        return spec


def _wrap(module: ModuleType) -> None:
    owner, methods = WRAPPED[module.__name__]
    cls = getattr(module, owner)
    for name in methods:
        setattr(cls, name, classmethod(_registering(cls, name)))


def _registering(cls: type, name: str):
    """Return the class method ``name``, which imports the compressed modules before its first call."""
    stock, is_registered = getattr(cls, name).__func__, False

    @functools.wraps(stock)
    def build(cls_, *args, **kwargs):
        nonlocal is_registered
        if is_registered:
            return stock(cls_, *args, **kwargs)
        importlib.import_module("rankfold.modules")  # may put a function of its own in this one's place
        is_registered = True
        return getattr(cls, name).__func__(cls_, *args, **kwargs)

    return build
