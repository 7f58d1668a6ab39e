"""What a recovery is asked for, and whether it can be done."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel
from transformers.integrations import get_available_reporting_integrations

from .._utils.files import check_name, check_output
from .._utils.processes import exchange_device, launched_count, process_count
from ..errors import OptionError, option
from ..models.devices import is_on
from .loss import Loss
from .tuning import Tune


@dataclass(frozen=True)
class Options:
    """The options of a run; equal options, models and texts give equal weights."""

    tune: Tune
    loss: Loss
    tokens: int
    rank: int
    lr: float | None  # None: as the model takes it, see .rate
    batch_tokens: int
    length: int
    tolerance: float
    seed: int
    text_column: str


@dataclass(frozen=True)
class Settings:
    """How a run is done; with equal options every way gives the same weights, but for ``minutes`` and ``adapter``."""

    minutes: float | None = None
    adapter: bool = False
    gradient_checkpointing: bool = False
    report_to: str = "none"
    cache_logits: str | Path | None = None


def check_processes() -> None:
    """Refuse what Trainer would read from the environment, and what cannot be done.

    Raises:
        OptionError: others were launched with this process, which works alone; or accelerate is to shard the weights.
    """
    if launched_count() > process_count():
        raise OptionError(
            f"{launched_count()} processes run this script, and only those of a command train together; give `rankfold "
            "recover` to torchrun or accelerate launch, or run the script without them"
        )
    for name in ("FSDP", "DEEPSPEED"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise OptionError(
                f"training shares sequences among processes, not weights, and accelerate is set to {name}; choose "
                f"multi-GPU or multi-CPU in its config, or unset ACCELERATE_USE_{name}"
            )


def check_seed(seed: int) -> None:
    """Raise :class:`OptionError` where Trainer takes no such seed; the draw of texts takes more."""
    if not 0 <= seed < 2**32:
        raise OptionError(f"training takes a seed from 0 to 2**32 - 1, got {str(seed)[:24]}")


def check_device(model: PreTrainedModel) -> None:
    """Raise :class:`OptionError` where processes that train together have a model elsewhere than what they exchange.

    Alone, Trainer knows one device of each kind: the first that it sees.
    """
    expected = exchange_device()
    if expected is None:
        if model.device.index:
            raise OptionError(
                f"training runs on the first device that the program sees, and the model is on {model.device}; give "
                f"{option('device', model.device.type)}, and choose the device by CUDA_VISIBLE_DEVICES or the like"
            )
    elif not is_on(next(model.parameters()), expected):
        on_cpu = ", or set ACCELERATE_USE_CPU=1" if model.device.type == "cpu" else ""
        raise OptionError(
            f"the processes of this run exchange gradients on {expected}, and the model is on {model.device}; "
            f"give {option('device', expected.type)}{on_cpu}"
        )


def check(options: Options, settings: Settings, output: str | Path | None) -> None:
    """Raise :class:`OptionError` where an option is out of range, or has no effect beside another one."""
    check_processes()
    least = {"tokens": 1, "rank": 1, "batch_tokens": 1, "max_length": 2}  # one token predicts the next
    for name, value in zip(least, (options.tokens, options.rank, options.batch_tokens, options.length), strict=True):
        if value < least[name]:
            raise OptionError(f"{option(name)} must be at least {least[name]}, got {value}")
    for name, value in (("lr", options.lr), ("minutes", settings.minutes)):
        if value is not None and not 0 < value < math.inf:  # a NaN neither
            raise OptionError(f"{option(name)} must be more than 0 and finite, got {value}")
    if not 0 <= options.tolerance < math.inf:
        raise OptionError(f"{option('tolerance')} must be at least 0 and finite, got {options.tolerance}")
    check_seed(options.seed)
    if settings.report_to not in (known := ["none", "all", *get_available_reporting_integrations()]):
        raise OptionError(
            f"{option('report_to')} must be one of {', '.join(known)}, got {settings.report_to!r}; install what is "
            "to be used"
        )
    if settings.adapter and (not options.tune.startswith("lora") or output is None):
        raise OptionError(
            f"{option('adapter', True)} writes the adapters of {option('tune', 'lora')} or "
            f"{option('tune', 'lora-mlp')} to {option('output')}; give both"
        )
    if settings.cache_logits is not None and options.loss == "next-token":
        raise OptionError(
            f"{option('cache_logits')} keeps what the dense model predicts, which {option('loss', 'next-token')} does "
            f"not use; leave it out, or give {option('loss', 'kl')}"
        )
    if settings.cache_logits is not None:
        check_name(Path(settings.cache_logits))
    if output is not None:
        check_output(Path(output))
    if output is not None and settings.cache_logits is not None:
        _check_apart(Path(output), Path(settings.cache_logits))


def _check_apart(output: Path, cache: Path) -> None:
    """Raise :class:`OptionError` where the folder to write would be in the way of the cache, or the other way round."""
    folders = [Path(os.path.abspath(folder)) for folder in (output, cache)]
    if any(one.is_relative_to(other) for one, other in (folders, folders[::-1])):
        raise OptionError(
            f"{option('cache_logits')} {cache} and {option('output')} {output} are one folder, or one is in the other; "
            "choose another folder for one of them"
        )


def check_blockwise(options: Options, settings: Settings, output: str | Path | None) -> None:
    """Raise :class:`OptionError` where an option has no effect block by block."""
    if launched_count() > 1:
        raise OptionError(
            f"{option('blockwise', True)} trains in one process, got {launched_count()}; give the command without "
            "torchrun or accelerate launch, or leave it out"
        )
    if output is None:
        raise OptionError(
            f"{option('blockwise', True)} writes one block at a time to a folder; give {option('output')}"
        )
    if options.tune.startswith("lora"):
        raise OptionError(
            f"{option('blockwise', True)} trains the weights of a block themselves; give {option('tune', 'all')} or "
            f"{option('tune', 'norms')}, got {option('tune', options.tune)}"
        )
    given = [field.name for field in fields(settings) if getattr(settings, field.name) != field.default]
    given += ["loss"] if options.loss != "kl" else []
    if given:
        raise OptionError(
            f"{option('blockwise', True)} compares the states after every block, on as many tokens as "
            f"{option('tokens')} says; leave out {', '.join(map(option, given))}"
        )
