"""Hidden units and heads that go without anything being refitted; see :mod:`.method`."""

from .variants import FLAP, Magnitude, Strided

__all__ = ["FLAP", "Magnitude", "Strided"]
