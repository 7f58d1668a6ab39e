"""The modules found in a compressed model; :mod:`.bundle` puts them into one file beside every checkpoint."""

from .attention import CompressedAttention
from .building import build, install, tied_weights
from .bundle import CODE_FILE, code
from .experts import LatentExperts
from .latent import LatentLinear, SplitHeadLinear
from .loading import (
    AUTO_MAP,
    FORMAT,
    FORMATS,
    METHOD_NAME,
    METHOD_NAMES,
    RankfoldConfig,
    attach,
    current_name,
    digest,
    install_described,
)
from .norms import PredictedNorm
from .shortcuts import ShortcutBlock
from .sparse import SparseCorrection, SparseLinear
from .tensors import QuantizedTensor

__all__ = [
    "AUTO_MAP",
    "CODE_FILE",
    "FORMAT",
    "FORMATS",
    "METHOD_NAME",
    "METHOD_NAMES",
    "CompressedAttention",
    "LatentExperts",
    "LatentLinear",
    "PredictedNorm",
    "QuantizedTensor",
    "RankfoldConfig",
    "ShortcutBlock",
    "SparseCorrection",
    "SparseLinear",
    "SplitHeadLinear",
    "attach",
    "build",
    "code",
    "current_name",
    "digest",
    "install",
    "install_described",
    "tied_weights",
]
