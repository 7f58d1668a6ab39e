"""All that a model is calibrated or evaluated on."""
