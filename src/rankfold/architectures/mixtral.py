"""Mixtral: Llama's attention; the experts' 3-D parameters are left alone."""

from dataclasses import replace

from .llama import LLAMA

ARCHITECTURES = (replace(LLAMA, model_type="mixtral", mlp=None),)
