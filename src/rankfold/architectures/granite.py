"""Granite: Llama's block, a factor behind each half of it; its mixture of experts."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec

GRANITE = replace(LLAMA, model_type="granite", adds=False)

EXPERTS = ExpertsSpec(path="block_sparse_moe.experts", width="intermediate_size")

ARCHITECTURES = (GRANITE, replace(GRANITE, model_type="granitemoe", mlp=None, experts=EXPERTS))
