"""Hidden units and heads that go, and mostly nothing is refitted; see :mod:`.method`."""
