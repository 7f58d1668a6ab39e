"""What model families look like, as data, and one view of their weights."""

from .attention import FIXED_ROTARY, AttentionView, own_frequencies
from .experts import ExpertsView
from .linear import Dense, as_stored, read_linear
from .models import MODELS, NamedModel
from .norms import Norm
from .parts import PARTS, Part, context_of, part_of
from .rebuilding import FROM_CONFIG, copied_config, from_config, with_fields
from .registry import architecture_of, check_stock, family_of, known_architectures
from .spec import Architecture, AttentionSpec, ByConfig, ExpertsSpec, MLPSpec, NormsSpec, left_dense
from .views import BlockView, MLPView

__all__ = [
    "FIXED_ROTARY",
    "FROM_CONFIG",
    "MODELS",
    "PARTS",
    "Architecture",
    "AttentionSpec",
    "AttentionView",
    "BlockView",
    "ByConfig",
    "Dense",
    "ExpertsSpec",
    "ExpertsView",
    "MLPSpec",
    "MLPView",
    "NamedModel",
    "Norm",
    "NormsSpec",
    "Part",
    "architecture_of",
    "as_stored",
    "check_stock",
    "context_of",
    "copied_config",
    "family_of",
    "from_config",
    "known_architectures",
    "left_dense",
    "own_frequencies",
    "part_of",
    "read_linear",
    "with_fields",
]
