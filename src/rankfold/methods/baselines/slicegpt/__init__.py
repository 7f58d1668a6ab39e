"""SliceGPT: the residual stream itself becomes narrower; see :mod:`.method`."""
