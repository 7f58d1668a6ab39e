"""Pure functions on tensors: roots, weighted factorisations, selections. Nothing here knows a model."""
