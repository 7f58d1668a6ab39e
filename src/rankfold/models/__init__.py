"""Open a dense model and read it one block at a time."""
