"""What a model costs, or two beside each other: speed by batch size, memory, bytes, parameters, operations."""

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._utils.memory import release_memory
from ..architectures import context_of
from ..errors import OptionError, UnsupportedModelError, option
from ..models.given import resolve_model
from ..report.record import environment, process_status
from .complexity import cache_bytes, complexity
from .speed import PROMPT, STEPS, lengths, prompts, run, speed

log = logging.getLogger(__name__)
MEMORY = (
    "bytes of parameters and buffers, and by how much the process (CPU) or the device's allocator grew at most during "
    "one prefill and decode of the batch; null where the system does not tell"
)
COUNTED = 128  # tokens of the forward whose operations are counted


@dataclass(frozen=True)
class Cost:
    """What to measure.

    Args:
        against: a second model, name as for :func:`~rankfold.load`: both run in turn and ratios are over this one.
        batch_sizes: sequences at a time, each ``>= 1``.
        repeats: measured rounds, ``>= 1``.
    """

    against: str | None = None
    batch_sizes: Sequence[int] = (1, 8, 32)
    repeats: int = 5

    def check(self, model: str) -> None:
        """Raise :class:`OptionError` for what cannot be measured."""
        if self.against == model:
            raise OptionError(
                f"{option('baseline')} is the model itself, {model}; give another one, e.g. the dense one"
            )
        sizes = list(self.batch_sizes)
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise OptionError(
                f"{option('batch_sizes')} takes different numbers >= 1, e.g. 1,8,32; got {','.join(map(str, sizes))}"
            )

    def measure(self, models: Mapping[str, PreTrainedModel]) -> dict:
        """Cost of loaded models; the first is what others are compared with.

        Returns:
            ``{"models": {name: facts}, "batches": [speed at a batch size with "peak_memory_bytes" in every model],
            "environment", "memory_definition"}``; facts are ``bytes_on_disk`` and what
            :func:`~rankfold.evaluation.complexity.complexity` says. Operations that depend on routing (a mixture of
            experts) are ``None``, and ``not_counted`` says so. See :func:`~rankfold.evaluation.speed.speed` for the
            rest.
        """
        contexts = [context_of(m.config) for m in models.values()]
        context = min([c for c in contexts if c] or [PROMPT + STEPS])
        prompt, steps = lengths(context)
        if prompt < PROMPT:
            log.info("the model's context is %d: prompts of %d tokens, %d decoded", context, prompt, steps)
        facts = {name: _facts(name, model, min(COUNTED, context)) for name, model in models.items()}
        batches = []
        for batch in self.batch_sizes:
            ids = prompts(models, batch, prompt)
            peaks = {name: peak_memory(model, ids, steps) for name, model in models.items()}
            result = speed(models, batch=batch, prompt=prompt, steps=steps, repeats=self.repeats)
            for name, peak in peaks.items():
                result["models"][name]["peak_memory_bytes"] = peak
            batches.append(result)
        device = next(iter(models.values())).device
        return {"models": facts, "batches": batches, "environment": environment(device), "memory_definition": MEMORY}


def _facts(name: str, model: PreTrainedModel, tokens: int) -> dict:
    try:
        counted = complexity(model, tokens)
    except UnsupportedModelError as error:
        counted = {"macs_per_token": None, "flops_per_token": None, "not_counted": str(error)}
        counted |= {"parameters": sum(p.numel() for p in model.parameters()), "kv_bytes_per_token": cache_bytes(model)}
    return {"bytes_on_disk": bytes_on_disk(name), **counted}


def bytes_on_disk(model: str | Path) -> int:
    """Size of the weights in safetensors shards, or of the ``.gguf`` file.

    Raises:
        CheckpointError: there are none.
    """
    path, weights = resolve_model(model)
    return weights.bytes_on_disk if weights else path.stat().st_size


def peak_memory(model: PreTrainedModel, ids: Tensor, steps: int) -> int | None:
    """What one prefill and decode needs at its peak, by the definition :data:`MEMORY`.

    Args:
        ids: ``(B, T)`` prompts.
        steps: tokens decoded after them.
    """
    device = model.device
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    grown = _growth_of_process(model, ids, steps) if device.type == "cpu" else _growth_on(device, model, ids, steps)
    return None if grown is None else sum(held.values()) + grown


def _growth_of_process(model: PreTrainedModel, ids: Tensor, steps: int) -> int | None:
    gc.collect()  # what is freed meanwhile would hide what is taken, and so would what was freed and is still held
    release_memory()
    before = process_status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far; see proc(5)
    except OSError:
        return None
    run(model, ids, steps)
    peak = process_status("VmHWM")
    return None if peak is None or before is None else max(0, peak - before)


def _growth_on(device: torch.device, model: PreTrainedModel, ids: Tensor, steps: int) -> int | None:
    try:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
    except RuntimeError:  # a device whose allocator keeps no statistics
        return None
    run(model, ids, steps)
    return torch.accelerator.max_memory_allocated(device) - before
