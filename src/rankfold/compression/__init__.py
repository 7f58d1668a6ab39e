"""The steps of one compression, in the order in which they run."""
