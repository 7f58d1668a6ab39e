"""rankfold: shrink any Hugging Face language model in minutes, without training.

::

    import rankfold

    source = rankfold.open_model("HuggingFaceTB/SmolLM2-135M")
    tokens = rankfold.load_tokens("wikitext2", source)
    model = rankfold.compress(source, rankfold.Rankfold(sparsity=0.3), tokens)
    rankfold.save(model, "small", source.tokenizer)

After ``import rankfold``, ``AutoModelForCausalLM.from_pretrained`` loads compressed checkpoints. The import itself takes a few
milliseconds: PyTorch and transformers are imported with the first name that needs them.
"""

from typing import TYPE_CHECKING

from ._lazy import importing
from ._registration import register_on_first_use
from .errors import RankfoldError
from .version import __version__

if TYPE_CHECKING:
    from .calibration.examples import Examples, load_examples
    from .calibration.images import Images, load_images
    from .calibration.store import MomentStore
    from .calibration.tokens import Tokens, load_tokens
    from .checkpoint.load import load_model as load
    from .checkpoint.saving import save_model as save
    from .checkpoint.source import Source, open_model
    from .evaluation.perplexity import perplexity
    from .evaluation.text import evaluate_text
    from .exports import Exported, export
    from .methods import LatentLLM, MoDeGPT, Rankfold, make_method, method_names
    from .parts import compress_parts
    from .pipeline import calibrate, compress, plan
    from .report.plan import Plan

__all__ = [
    "Examples",
    "Exported",
    "Images",
    "LatentLLM",
    "MoDeGPT",
    "MomentStore",
    "Plan",
    "Rankfold",
    "RankfoldError",
    "Source",
    "Tokens",
    "__version__",
    "calibrate",
    "compress",
    "compress_parts",
    "evaluate_text",
    "export",
    "load",
    "load_examples",
    "load_images",
    "load_tokens",
    "make_method",
    "method_names",
    "open_model",
    "perplexity",
    "plan",
    "save",
]

__getattr__, __dir__ = importing(
    __name__,
    {
        "Examples": ".calibration.examples",
        "Exported": ".exports",
        "Images": ".calibration.images",
        "LatentLLM": ".methods",
        "MoDeGPT": ".methods",
        "MomentStore": ".calibration.store",
        "Plan": ".report.plan",
        "Rankfold": ".methods",
        "Source": ".checkpoint.source",
        "Tokens": ".calibration.tokens",
        "calibrate": ".pipeline",
        "compress": ".pipeline",
        "compress_parts": ".parts",
        "evaluate_text": ".evaluation.text",
        "export": ".exports",
        "load": ".checkpoint.load:load_model",
        "load_examples": ".calibration.examples",
        "load_images": ".calibration.images",
        "load_tokens": ".calibration.tokens",
        "make_method": ".methods",
        "method_names": ".methods",
        "open_model": ".checkpoint.source",
        "perplexity": ".evaluation.perplexity",
        "plan": ".pipeline",
        "save": ".checkpoint.saving:save_model",
    },
    globals(),
)

register_on_first_use()
