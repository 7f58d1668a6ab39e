"""Let transformers load compressed checkpoints once rankfold is imported, without importing transformers or PyTorch for
it.

The classes that read a compressed checkpoint (:mod:`rankfold.modules`) are imported when a model is first built.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

MODULE = "transformers.modeling_utils"
BUILDERS = ("from_pretrained", "_from_config")  # class methods of PreTrainedModel, in one of which every model is built


def register_on_first_use() -> None:
    """Wrap the two class methods now where transformers is imported already, else as soon as it is."""
    module = sys.modules.get(MODULE)
    if module is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _wrap(module)


class _Finder:  # of importlib.abc only by its method: that module takes a tenth of the time of `rankfold --version`
    """Find :data:`MODULE` as Python does, and wrap its class methods when it has been executed."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
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
    for name in BUILDERS:
        setattr(module.PreTrainedModel, name, classmethod(_registering(module.PreTrainedModel, name)))


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
