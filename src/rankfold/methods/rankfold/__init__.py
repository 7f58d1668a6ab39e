"""The default method; see :mod:`.method`."""
