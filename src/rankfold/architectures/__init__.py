"""What model families look like, as data, and one view of their weights."""

from .norms import Norm
from .parts import Part, part_of
from .registry import architecture_of, family_of, known_architectures
from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec, NormsSpec
from .views import AttentionView, BlockView, Dense, MLPView, as_stored, own_frequencies, read_linear

__all__ = [
    "Architecture",
    "AttentionSpec",
    "AttentionView",
    "BlockView",
    "ByConfig",
    "Dense",
    "MLPSpec",
    "MLPView",
    "Norm",
    "NormsSpec",
    "Part",
    "architecture_of",
    "as_stored",
    "family_of",
    "known_architectures",
    "own_frequencies",
    "part_of",
    "read_linear",
]
