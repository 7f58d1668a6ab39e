"""What a compression came to."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .._utils.present import present
from ..checkpoint.load import load_model
from ..checkpoint.saving import save_model
from ..models.dense_model import DenseModel
from ..models.processors import Processors
from ..report.plan import ModulePlan, Plan
from ..report.record import read_record


class CompressionResult:
    """A compressed model, what was planned, and what happened.

    Attributes:
        plan: ranks, sizes and counts.
        record: everything the numbers depend on and what was measured; ``rankfold.json`` of a folder.
        output: the folder that was written; ``None`` where the model is in memory only.
        dense: the model that was compressed; ``None`` where this process did not do it, or read a whole file for it.
    """

    dense: DenseModel | None = None

    def __init__(
        self,
        plan: Plan,
        record: dict[str, Any],
        output: Path | None = None,
        model: PreTrainedModel | None = None,
        *,
        processors: Processors | None = None,
        device: str = "auto",
    ):
        self.plan, self.record, self.output = plan, record, output
        self._model, self._processors, self._device = model, processors, device

    @classmethod
    def of_folder(cls, output: Path, *, device: str = "auto") -> "CompressionResult":
        """Describe a folder that a compression has written."""
        record = read_record(output)
        planned: dict[str, Any] = {"seconds": None} | record["plan"] | record["run"]["estimated"]
        planned["modules"] = tuple(_as(ModulePlan, module) for module in planned["modules"])
        plan = _as(Plan, planned | {"calibration": record["calibration"]})
        return cls(plan, record, output, device=device)

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """Return the compressed model in memory; of a folder it is loaded at the first use."""
        return load_model(present(self.output), device=self._device) if self._model is None else self._model

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model, with its tokenizer where it has one, so that it loads anywhere.

        Raises:
            CheckpointError: the folder exists or cannot be written.
        """
        found = self._processors
        return save_model(self.model, folder, found.tokenizer if found and found.has_tokenizer else None)

    def __repr__(self) -> str:
        plan, held_out = self.plan, self.record.get("held_out") or {}
        facts = [
            f"{plan.method['method']}, sparsity {plan.sparsity:.2f}",
            f"{plan.parameters:,} -> {plan.parameters_after:,} parameters",
        ]
        if "perplexity" in held_out:
            facts.append(f"held-out perplexity {held_out['perplexity_dense']:.2f} -> {held_out['perplexity']:.2f}")
        facts.append("in memory" if self.output is None else f"in {str(self.output)!r}")
        return f"CompressionResult({'; '.join(facts)})"


def _as(kind: type[Any], values: dict[str, Any]) -> Any:
    """Return a dataclass of the values that it knows; a record may hold others."""
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})
