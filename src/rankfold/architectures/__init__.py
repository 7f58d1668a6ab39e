"""What model families look like, as data, and one view of their weights."""

from .registry import architecture_of, known_architectures
from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec
from .views import AttentionView, BlockView, Dense, MLPView, read_linear

__all__ = [
    "Architecture",
    "AttentionSpec",
    "AttentionView",
    "BlockView",
    "ByConfig",
    "Dense",
    "MLPSpec",
    "MLPView",
    "architecture_of",
    "known_architectures",
    "read_linear",
]
