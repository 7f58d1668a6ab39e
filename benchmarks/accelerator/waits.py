"""How often a compression of a block waits for the device, and where."""

import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

import common
import rankfold
from rankfold import make_method

from .bench import Bench
from .models import random_ids

DEFINITIONS = {
    "waits": "synchronisations that torch.cuda.set_sync_debug_mode counts in a run of three blocks, less those of two",
    "places": "file and line of the most of them -> how many a block",
}
METHODS = ("modegpt", "rankfold", "latentllm")
LISTED = 12


def run(bench: Bench) -> None:
    for method in METHODS:
        if bench.wants(method):
            with bench.trying(method):
                two, three = (count(bench, method, blocks) for blocks in (2, 3))
                three.subtract(two)
                places = {place: waits for place, waits in three.most_common(LISTED) if waits > 0}
                known = bench.device.type == "cuda"  # other devices do not tell
                bench.add(method, waits=sum(three.values()) if known else None, places=places)


def count(bench: Bench, method: str, blocks: int) -> Counter[str]:
    """Return place -> synchronisations of compressing a model of so many blocks."""
    width, hidden = (32, 48) if bench.is_tiny else (512, 1408)
    torch.manual_seed(0)
    heads, kv_heads = width // 32 or 1, max(1, width // 64)
    config = common.llama(width, hidden, heads, kv_heads, blocks, 512, max_position_embeddings=512)
    model = transformers.LlamaForCausalLM(config).to(bench.device, torch.bfloat16)
    samples, length = (4, 32) if bench.is_tiny else (32, 128)
    # A measured allocation runs every trial through all blocks after it: a wait a block more for each.
    chosen = make_method(method, sparsity=0.3, allocation="uniform")
    with counted(bench) as places:
        rankfold.compress(model, method=chosen, calibration=random_ids(bench, 512, samples, length))
    return places


class counted:
    """Count the waits of what runs inside, by the line of rankfold that made them."""

    def __init__(self, bench: Bench):
        self.on, self.places = bench.device.type == "cuda", Counter[str]()

    def __enter__(self) -> Counter[str]:
        self.caught = warnings.catch_warnings(record=True)
        self.seen = self.caught.__enter__()
        warnings.simplefilter("always")
        if self.on:
            torch.cuda.set_sync_debug_mode("warn")
        return self.places

    def __exit__(self, *error: object) -> None:
        if self.on:
            torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(*error)
        self.places.update(place_of(w.filename, w.lineno) for w in self.seen or () if is_wait(str(w.message)))


def is_wait(message: str) -> bool:
    return "synchroniz" in message.lower()


def place_of(file: str, line: int) -> str:
    """Return a file below its package, and a line; nothing of the machine's folders."""
    parts = Path(file).parts
    start = max(
        (i for i, part in enumerate(parts) if part in ("rankfold", "torch", "transformers")), default=len(parts) - 1
    )
    return f"{'/'.join(parts[start:])}:{line}"
