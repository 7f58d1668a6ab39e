"""The modules found in a compressed model; one self-contained file that is copied into every checkpoint."""

from .modeling_rankfold import (
    CODE_FILE,
    FORMAT,
    CompressedAttention,
    LatentLinear,
    QuantizedTensor,
    RankfoldConfig,
    SparseCorrection,
    attach,
    build,
    install,
)

__all__ = [
    "CODE_FILE",
    "FORMAT",
    "CompressedAttention",
    "LatentLinear",
    "QuantizedTensor",
    "RankfoldConfig",
    "SparseCorrection",
    "attach",
    "build",
    "install",
]
