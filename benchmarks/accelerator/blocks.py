"""Compressions of random models of real shapes: seconds by part, peak memory against the plan, minutes for a model."""

import shutil
import time

import rankfold
from rankfold import make_method
from rankfold.methods import method_class

from .bench import Bench, memory_of, peak_since, start_peak
from .models import SHAPES, config_of, depth_of, random_ids, write_model

DEFINITIONS = {
    "total": "seconds from an open model to a finished checkpoint on disk, read back and checked",
    "parts": "seconds by part of the run record; work of the device is counted where the run waits for its result",
    "block_seconds": "total over blocks",
    "whole_minutes": "block_seconds times the blocks of the whole model, over 60; trials of a measured allocation run "
    "through all blocks after their own, which grows with the square and is not in it",
    "peak_bytes": "largest memory of the device that tensors took; on a CPU what the process grew by",
    "plan_bytes": "peak that the plan of the run estimated",
    "predicted_minutes": "of the whole model, by rankfold.plan for a card of this memory",
}
CASES = (("7b", 4), ("13b", 2), ("70b", 1))  # shape, blocks
WHOLE = ("modegpt", "rankfold")
MODES = (("modegpt", "sequential"), ("modegpt", None), ("rankfold", "sequential"), ("latentllm", "sequential"))
SAMPLES, LENGTH, SPARSITY = 128, 2048, 0.3


def run(bench: Bench) -> None:
    """Compress a few blocks of every shape."""
    cases = (("tiny", 2),) if bench.is_tiny else CASES
    for shape, blocks in cases:
        if bench.shape in (None, shape):
            for method, mode in MODES:
                if bench.methods is None or method in bench.methods:
                    _measure(bench, shape, blocks, method, mode)
            shutil.rmtree(bench.folder / f"{shape}-{blocks}", ignore_errors=True)


def run_whole(bench: Bench) -> None:
    """Compress all blocks of one shape."""
    shape = "tiny" if bench.is_tiny else bench.shape or "7b"
    for method in bench.methods or WHOLE:
        _measure(bench, shape, depth_of(shape), method, "sequential", least=bench.limit / 4)


def _measure(bench: Bench, shape: str, blocks: int, name: str, mode: str | None, least: float = 0.0) -> None:
    mode = mode or next(other for other in method_class(name).modes if other != "sequential")
    row = f"{shape}, {blocks} blocks, {name} {mode}"
    if not bench.wants(row, least):
        return
    with bench.trying(row):
        samples, length = (4, 32) if bench.is_tiny else (SAMPLES, LENGTH)
        # An eigenvalue problem of that width takes seconds, and a block has ten: one block shows what it takes.
        alone = name == "latentllm" and blocks > 1 and not bench.is_tiny
        excluded = tuple(range(1, blocks)) if alone else ()
        method = make_method(name, sparsity=SPARSITY / blocks if alone else SPARSITY, exclude_blocks=excluded)
        folder, output = write_model(bench, shape, blocks), bench.folder / "small"
        shutil.rmtree(output, ignore_errors=True)
        before, begin = start_peak(bench.device), time.perf_counter()
        source = rankfold.open_model(folder, device=str(bench.device))
        tokens = random_ids(bench, source.config.vocab_size, samples, length)
        result = rankfold.compress(source, method=method, calibration=tokens, output=output, mode=mode)
        total, peak = time.perf_counter() - begin, peak_since(bench.device, before)
        done = blocks - len(excluded)
        bench.add(
            row,
            shape=shape,
            blocks=done,
            method=name,
            mode=mode,
            tokens=samples * length,
            total=total,
            parts=result.record["run"]["seconds"],
            block_seconds=total / done,
            whole_minutes=total / done * depth_of(shape) / 60,
            peak_bytes=peak,
            plan_bytes=result.plan.peak_memory_bytes,
            predicted_minutes=_predicted(bench, shape, name, samples, length),
        )


def _predicted(bench: Bench, shape: str, method: str, samples: int, length: int) -> float:
    size = f"{memory_of(bench.device) / 1e9:.0f}GB"
    numbers = {"num_samples": samples, "max_length": length}
    plan = rankfold.plan(config_of(shape), SPARSITY, method=method, gpu=size, **numbers)
    return (plan.seconds or 0.0) / 60


__all__ = ["DEFINITIONS", "SHAPES", "run", "run_whole"]
