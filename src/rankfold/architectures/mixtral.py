"""Mixtral: Llama's attention, experts in place of its MLP."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec

ARCHITECTURES = (replace(LLAMA, model_type="mixtral", mlp=None, experts=ExpertsSpec(width="intermediate_size")),)
