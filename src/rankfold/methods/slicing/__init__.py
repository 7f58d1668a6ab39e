"""Hidden units and heads that go without anything being refitted; see :mod:`.method`."""

from .gradients import OBD, LLMPruner
from .variants import FLAP, Magnitude, Strided

__all__ = ["FLAP", "OBD", "LLMPruner", "Magnitude", "Strided"]
