"""rankfold: shrink Hugging Face language models in minutes, without training.

::

    import rankfold

    result = rankfold.compress("HuggingFaceTB/SmolLM2-135M", 0.3, output="small")
    result.model.generate(...)

After ``import rankfold``, ``AutoModelForCausalLM.from_pretrained`` loads compressed checkpoints. The import itself
takes a few milliseconds: PyTorch and transformers are imported with the first name that needs them.
"""

from typing import TYPE_CHECKING

from ._registration import register_on_first_use
from ._utils.lazy import importing
from .errors import RankfoldError
from .version import __version__

if TYPE_CHECKING:
    from .api import (
        calibrate,
        compress,
        compress_components,
        evaluate_text,
        export,
        load,
        load_calibration,
        make_method,
        open_model,
        perplexity,
        plan,
        push,
        save,
    )
    from .calibration.store import MomentStore
    from .compression.result import CompressionResult
    from .data.calibration_data import CalibrationData
    from .exports import Exported
    from .methods import LatentLLM, MoDeGPT, Rankfold, method_names
    from .models.dense_model import DenseModel
    from .recovery.recover import RecoveryResult, recover
    from .report.plan import Plan

__all__ = [
    "CalibrationData",
    "CompressionResult",
    "DenseModel",
    "Exported",
    "LatentLLM",
    "MoDeGPT",
    "MomentStore",
    "Plan",
    "Rankfold",
    "RankfoldError",
    "RecoveryResult",
    "__version__",
    "calibrate",
    "compress",
    "compress_components",
    "evaluate_text",
    "export",
    "load",
    "load_calibration",
    "make_method",
    "method_names",
    "open_model",
    "perplexity",
    "plan",
    "push",
    "recover",
    "save",
]

_CLASSES = {
    "CalibrationData": ".data.calibration_data",
    "CompressionResult": ".compression.result",
    "Exported": ".exports",
    "LatentLLM": ".methods",
    "MoDeGPT": ".methods",
    "MomentStore": ".calibration.store",
    "Plan": ".report.plan",
    "Rankfold": ".methods",
    "RecoveryResult": ".recovery.recover",
    "recover": ".recovery.recover",
    "DenseModel": ".models.dense_model",
    "method_names": ".methods",
}
__getattr__, __dir__ = importing(
    __name__, {name: _CLASSES.get(name, ".api") for name in __all__ if name not in globals()}, globals()
)

register_on_first_use()
