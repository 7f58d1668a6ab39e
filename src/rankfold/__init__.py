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

from collections.abc import Callable as _Callable

from transformers import PreTrainedModel as _PreTrainedModel

from . import modules as _modules  # noqa: F401 - registers the checkpoint format with transformers
from .arguments import typed as _typed
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

# An argument of a wrong type is refused in one line. Calibration lies below the models, so its functions cannot name them.
calibrate, compress, compress_parts, plan = map(_typed, (calibrate, compress, compress_parts, plan))
evaluate_text, export = map(_typed, (evaluate_text, export))
perplexity = _typed(perplexity, model=_PreTrainedModel)
load, make_method, save = map(_typed, (load, make_method, save))
open_model = _typed(open_model, tokenizer=_Callable | None)
load_tokens = _typed(load_tokens, source=Source)
load_images = _typed(load_images, source=Source, processor=_Callable | None)
load_examples = _typed(load_examples, source=Source, processor=_Callable | None)

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
