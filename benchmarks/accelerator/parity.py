"""The result on the device against that on the CPU: how far their predictions are apart, and what else is equal."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import rankfold
from rankfold import CalibrationData, make_method, method_names
from rankfold.calibration import runner
from rankfold.errors import RankfoldError
from rankfold.methods import method_class

from .bench import Bench

HELPERS = Path(__file__).resolve().parents[2] / "tests" / "helpers"
DEFINITIONS = {
    "kl": "mean KL(result of the CPU || result of the device), nats per token, both run on the CPU in fp32",
    "kl_dense": "mean KL(dense model || result of the CPU): what the compression itself does",
    "perplexity_ratio": "of the device's result over the CPU's, on held-out samples",
    "same_ranks": "whether all modules have the same rank",
    "limit": "of kl, asked of trained models alone: of random ones decisions are ties, which rounding decides",
    "same": "whether every byte of the result is the same when the device does it again; with reading ahead switched "
    "off; with batches of half the tokens. Not asked",
}
LIMITS = {"float32": 1e-4, "bfloat16": 5e-3}
MAIN = ("rankfold", "modegpt", "latentllm")
SPARSITY = dict.fromkeys(("wanda", "sparsegpt", "pruner-zero"), 0.5)
RANDOM = ("llama", "qwen3", "gemma3", "gpt_oss")  # families
TRAINED = ("qwen2", "opt", "mixtral")  # Llama's block with biases, and two that differ in all


@dataclass(frozen=True)
class Case:
    """One comparison."""

    model: str
    method: str
    mode: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.method} {self.mode} {self.dtype}"


@dataclass(frozen=True)
class Subject:
    """A model and its samples."""

    model: nn.Module
    tokens: CalibrationData
    held_out: Tensor
    is_trained: bool


def run(bench: Bench) -> None:
    subjects: dict[str, Subject] = {}
    for case in _cases(bench):
        if bench.wants(case.name):
            with bench.trying(case.name):
                if case.model not in subjects:
                    subjects[case.model] = _subject(case.model)
                bench.add(case.name, **compare(bench, case, subjects[case.model]))
    for method in MAIN:
        name = f"again {method}"
        if bench.wants(name):
            with bench.trying(name):
                model = _models(bench)[0]
                subject = subjects.get(model) or _subject(model)
                bench.add(name, same=_again(bench, method, subject))


def _models(bench: Bench) -> tuple[str, ...]:
    return ("random llama", "random opt") if bench.is_tiny else (*TRAINED, *(f"random {name}" for name in RANDOM))


def _cases(bench: Bench) -> Iterator[Case]:
    """Yield the most important first: the three products on all models, all methods in all modes, and bf16."""
    models = _models(bench)
    for model in models:
        for method in MAIN:
            yield Case(model, method, "sequential", "float32")
    for method in MAIN:
        yield Case(models[0], method, "sequential", "bfloat16")
    for method in MAIN if bench.is_tiny else [name for name in method_names() if not method_class(name).needs_experts]:
        for mode in method_class(method).modes:
            if method not in MAIN or mode != "sequential":
                yield Case(models[0], method, mode, "float32")


def _subject(name: str) -> Subject:
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    import families
    import trained

    if name in TRAINED:
        held_out = trained.held_out_windows()[:8]
        return Subject(trained.train(name), trained.with_held_out(trained.calibration()), held_out, True)
    model = families.tiny_model(name.removeprefix("random "))
    return Subject(model, families.tokens(), families.some_ids(8, 32, seed=3), False)


def compress(bench: Bench, case: Case, subject: Subject, device: torch.device, *, reads_ahead: bool = True):
    """Compress on a device in memory; blocks run in the dtype, without autocast."""
    model = copy.deepcopy(subject.model).to(device, getattr(torch, case.dtype))
    source = rankfold.open_model(model)
    source.autocast, source.overlaps = None, source.overlaps and reads_ahead
    method = make_method(case.method, sparsity=SPARSITY.get(case.method, 0.3), **_narrow(case.method))
    return rankfold.compress(source, method=method, calibration=subject.tokens, mode=case.mode)


def _narrow(method: str) -> dict:
    """Return ranks in steps of two, where a method has ranks: those of tiny models are few."""
    return {"rank_multiple": 2} if "rank_multiple" in method_class(method).__dataclass_fields__ else {}


@torch.no_grad()
def compare(bench: Bench, case: Case, subject: Subject) -> dict:
    here, there = (compress(bench, case, subject, device) for device in (torch.device("cpu"), bench.device))
    models = [copy.deepcopy(result.model).to("cpu", torch.float32) for result in (here, there)]
    own, other = (_log_probabilities(model, subject.held_out) for model in models)
    dense = _log_probabilities(subject.model.float(), subject.held_out)
    losses = [rankfold.perplexity(model, subject.held_out)["nll"] for model in models]
    limit = LIMITS[case.dtype] if subject.is_trained else None
    kl = _divergence(own, other)
    return {
        "method": case.method,
        "kl": kl,
        "kl_dense": _divergence(dense, own),
        "perplexity_ratio": torch.tensor(losses[1] - losses[0]).exp().item(),
        "same_ranks": [m.rank for m in here.plan.modules] == [m.rank for m in there.plan.modules],
        "limit": limit,
        **({} if limit is None else {"met": kl <= limit}),
    }


def _log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits.double().log_softmax(-1)


def _divergence(p: Tensor, q: Tensor) -> float:
    return (p.exp() * (p - q)).sum(-1).mean().item()


def _again(bench: Bench, method: str, subject: Subject) -> dict[str, bool | None]:
    case = Case("", method, "sequential", "float32")
    first = compress(bench, case, subject, bench.device)
    found: dict[str, bool | None] = {"again": _equal(first, compress(bench, case, subject, bench.device))}
    found["without reading ahead"] = _equal(first, compress(bench, case, subject, bench.device, reads_ahead=False))
    names = ("BATCH_TOKENS", "MOST_BATCH_TOKENS")
    there = {name: getattr(runner, name) for name in names}
    half = min(subject.tokens.tokens, there["MOST_BATCH_TOKENS"]) // 2
    try:
        for name in names:
            setattr(runner, name, half)
        found["batches of half the tokens"] = _equal(first, compress(bench, case, subject, bench.device))
    except RankfoldError:
        found["batches of half the tokens"] = None
    finally:
        for name, value in there.items():
            setattr(runner, name, value)
    return found


def _equal(first, second) -> bool:
    a, b = (result.model.state_dict() for result in (first, second))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
