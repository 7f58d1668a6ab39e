"""A few minutes of training after compression (MoDeGPT App. B.6, B.7): :mod:`.recover` is the place to start."""
