"""rankfold: shrink any Hugging Face language model in minutes, without training.

::

    import rankfold

    source = rankfold.open_model("HuggingFaceTB/SmolLM2-135M")
    tokens = rankfold.load_tokens("wikitext2", source)
    model = rankfold.compress(source, rankfold.Rankfold(sparsity=0.3), tokens)
    rankfold.save(model, "small", source.tokenizer)

Importing it registers the compressed modules with transformers, so that ``AutoModelForCausalLM.from_pretrained`` loads
compressed checkpoints; it touches no device.
"""

from . import modules as _modules  # noqa: F401 - registers the checkpoint format with transformers
from .calibration.examples import Examples, load_examples
from .calibration.images import Images, load_images
from .calibration.store import MomentStore
from .calibration.tokens import Tokens, load_tokens
from .checkpoint.load import load_model as load
from .checkpoint.saving import save_model as save
from .checkpoint.source import Source, open_model
from .errors import RankfoldError
from .evaluation.perplexity import perplexity
from .evaluation.text import evaluate_text
from .export import Exported, export
from .methods import LatentLLM, MoDeGPT, Rankfold, make_method, method_names
from .parts import compress_parts
from .pipeline import calibrate, compress, plan
from .report.plan import Plan
from .version import __version__

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
