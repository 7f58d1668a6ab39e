"""Hidden units and heads that go, and mostly nothing is refitted; see :mod:`.method`."""

from .gradients import OBD, LLMPruner
from .kronecker import KOBD, LLMSurgeon
from .variants import FLAP, Magnitude, Strided

__all__ = ["FLAP", "KOBD", "OBD", "LLMPruner", "LLMSurgeon", "Magnitude", "Strided"]
