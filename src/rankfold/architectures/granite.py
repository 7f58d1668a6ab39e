"""Granite: Llama's block, a factor behind each half of it; its mixture of experts."""

from dataclasses import replace

from .llama import LLAMA

GRANITE = replace(LLAMA, model_type="granite", adds=False)

ARCHITECTURES = (GRANITE, replace(GRANITE, model_type="granitemoe", mlp=None))
