"""Run a model as it is used, and leave its modes as they were."""

import contextlib
from collections.abc import Generator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Without dropout and the like; every module then has the mode back that its owner gave it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
