"""rankfold: shrink any Hugging Face language model in minutes, without training.

::

    import rankfold

    source = rankfold.open_model("HuggingFaceTB/SmolLM2-135M")
    data = rankfold.load_calibration("wikitext2", source)
    model = rankfold.compress(source, rankfold.Rankfold(sparsity=0.3), data)
    rankfold.save(model, "small", source.tokenizer)

After ``import rankfold``, ``AutoModelForCausalLM.from_pretrained`` loads compressed checkpoints. The import itself takes a few
milliseconds: PyTorch and transformers are imported with the first name that needs them.
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
        compress_parts,
        evaluate_text,
        export,
        load,
        load_calibration,
        make_method,
        open_model,
        perplexity,
        plan,
        save,
    )
    from .calibration.store import MomentStore
    from .data.calibration_data import CalibrationData
    from .exports import Exported
    from .methods import LatentLLM, MoDeGPT, Rankfold, method_names
    from .models.dense_model import DenseModel
    from .report.plan import Plan

__all__ = [
    "CalibrationData",
    "DenseModel",
    "Exported",
    "LatentLLM",
    "MoDeGPT",
    "MomentStore",
    "Plan",
    "Rankfold",
    "RankfoldError",
    "__version__",
    "calibrate",
    "compress",
    "compress_parts",
    "evaluate_text",
    "export",
    "load",
    "load_calibration",
    "make_method",
    "method_names",
    "open_model",
    "perplexity",
    "plan",
    "save",
]

_CLASSES = {
    "CalibrationData": ".data.calibration_data",
    "Exported": ".exports",
    "LatentLLM": ".methods",
    "MoDeGPT": ".methods",
    "MomentStore": ".calibration.store",
    "Plan": ".report.plan",
    "Rankfold": ".methods",
    "DenseModel": ".models.dense_model",
    "method_names": ".methods",
}
__getattr__, __dir__ = importing(
    __name__, {name: _CLASSES.get(name, ".api") for name in __all__ if name not in globals()}, globals()
)

register_on_first_use()
