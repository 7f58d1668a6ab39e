"""MoDeGPT; see :mod:`.method`."""
