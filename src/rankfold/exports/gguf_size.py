"""How large the file of ``gguf-deci`` will be of a model whose MLPs are to be narrower, before anything is written."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from .._utils.extras import require
from ..errors import OptionError, UnsupportedModelError, option
from ..models.dense_model import DenseModel
from ..report.goal import Goal
from ..report.plan import Plan
from .deci import narrowed_form
from .form import StockModel, plain
from .llama_cpp import ARCHS, OF_DECI, check_family, check_own


def is_one_width(source: DenseModel) -> bool:
    """Tell whether a file of a model has one width for all MLPs: ``deci`` is not of its family."""
    return source.config.model_type not in OF_DECI


def check_sized(source: DenseModel) -> None:
    """Raise an error unless the file of a model is known before it is compressed.

    Raises:
        UnsupportedModelError: there is no such file of it.
        OptionError: it has no tokenizer, which is a part of the file; or gguf is not installed.
    """
    require("gguf", "the size of a .gguf file")
    try:
        check_family(source, tuple(ARCHS))
        if is_one_width(source):
            check_own(StockModel(plain(source.model.config), source.architecture, {}))
    except UnsupportedModelError as error:
        reason = str(error).partition(";")[0]
        raise UnsupportedModelError(
            f"there is no GGUF file of {source.name} to size: {reason}; give {option('target_size')} without a dtype"
        ) from None
    if not source.processors.has_tokenizer or not isinstance(source.tokenizer, PreTrainedTokenizerBase):
        raise OptionError(f"a GGUF file holds a tokenizer of transformers, and {source.name} has none; give one")


def bytes_of(source: DenseModel, widths: list[int], dtype: str) -> tuple[int, int]:
    """Return the bytes of a file: of its settings, and of its numbers.

    Args:
        source: an open dense model that passes :func:`check_sized`.
        widths: of the MLPs of all blocks; the same one where :func:`is_one_width`.
        dtype: as for :func:`rankfold.export`.
    """
    from .gguf_layout import Layout, file_size

    return file_size(Layout(source, narrowed_form(source, widths), dtype, source.name))


def with_file(source: DenseModel, plan: Plan, goal: Goal | None) -> Plan:
    """Return a plan with the size of the GGUF file of what it leaves, where one was asked for."""
    if goal is None or goal.dtype is None:
        return plan
    full = [view.mlp.hidden for view in source.meta_blocks()]
    chosen = {row.block: row.rank for row in plan.modules}
    size = sum(bytes_of(source, [chosen.get(block, width) for block, width in enumerate(full)], goal.dtype))
    return replace(plan, file={"dtype": goal.dtype, "bytes": size})
