"""Pure functions on tensors: roots, weighted factorisations, selections. Nothing here knows a model.

They import torch, NumPy and each other: no modules, no hooks, no device policy (``make lint`` checks it).
"""
