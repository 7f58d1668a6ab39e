"""Prefill and decoding of a few blocks of a real shape, dense beside compressed at several rank multiples.

Speed depends on shapes, not on values, so weights are random and a compressed model is made from its config.
"""

import copy
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache

import common
import rankfold
from decode import modules_of
from rankfold._utils.evaluating import cache_for
from rankfold._utils.hardware import in_rounds, seconds_of
from rankfold.modules import METHOD_NAME

from .bench import Bench, empty_cache
from .models import bytes_of, config_of

DEFINITIONS = {
    "prefill": "B x T tokens over the time of one forward that computes the last logits; medians over rounds",
    "decode": "B tokens over the time of one greedy step with a static cache that holds 256 tokens",
    "compiled": "decoding under torch.compile(mode='reduce-overhead'), which takes the time of launches away",
    "ratio": "compressed over dense within a round; median over rounds, with its quartiles",
    "widths": "of queries and keys, values, and the MLP; uniform, at sparsity 0.3",
    "weight_bytes": "that a token reads: all parameters but the embedding",
    "attention": "the kernels that scaled_dot_product_attention took in a prefill",
}
BLOCKS, PROMPT, SPARSITY = 8, 256, 0.3
MULTIPLES = (8, 64, 128)
KERNEL = re.compile(r"^aten::(_scaled_dot_product_\w+)$")


def run(bench: Bench) -> None:
    models = _models(bench)
    prefill, decode, rounds = ([(1, 16)], [1], 4) if bench.is_tiny else ([(1, 2048), (8, 2048)], [1, 8, 64], 15)
    for batch, length in prefill:
        name = f"prefill {batch} x {length}"
        if bench.wants(name):
            with bench.trying(name):
                steps = {key: _prefill(bench, model, batch, length) for key, (model, _) in models.items()}
                kernels = {key: _kernels(step) for key, step in steps.items()}
                found = _in_rounds(bench, steps, batch * length, rounds)
                bench.add(
                    name, kind="prefill", batch=batch, length=length, found=found, attention=kernels, **_facts(models)
                )
    for compiled in (False, True):
        for batch in decode:
            name = f"decode {batch}{', compiled' if compiled else ''}"
            if bench.wants(name) and not (compiled and bench.device.type == "cpu"):
                with bench.trying(name):
                    steps = {key: _decode(bench, model, batch, rounds, compiled) for key, (model, _) in models.items()}
                    found = _in_rounds(bench, steps, batch, rounds)
                    bench.add(name, kind="decode", batch=batch, compiled=compiled, found=found, **_facts(models))
                torch.compiler.reset()


def _models(bench: Bench) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return name -> model in bf16 and its widths."""
    shape = "tiny" if bench.is_tiny else "7b"
    config = config_of(shape, 1 if bench.is_tiny else BLOCKS)
    dense = config.hidden_size // config.num_attention_heads
    found = {"dense": (_made(bench, config), (dense, dense, config.intermediate_size))}
    for multiple in (2,) if bench.is_tiny else MULTIPLES:
        plan = rankfold.plan(
            config, SPARSITY, method="modegpt", gpu="80GB", rank_multiple=multiple, allocation="uniform"
        )
        widths = tuple(plan.ranks(0)[module] for module in ("qk", "vo", "mlp"))
        small = copy.deepcopy(config)
        small.quantization_config = {"quant_method": METHOD_NAME, "modules": modules_of(small, *widths)}
        found[f"rank multiple {multiple}"] = _made(bench, small), widths
    return found


def _made(bench: Bench, config) -> nn.Module:
    with bench.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(bench.device).eval()


def _facts(models: dict) -> dict:
    return {
        "widths": {name: list(widths) for name, (_, widths) in models.items()},
        "weight_bytes": {name: bytes_of(model) for name, (model, _) in models.items()},
    }


def _prefill(bench: Bench, model: nn.Module, batch: int, length: int) -> Callable[[], object]:
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(bench.device)
    return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1).logits)


def _decode(bench: Bench, model: nn.Module, batch: int, rounds: int, compiled: bool) -> Callable[[], object]:
    """Return one greedy step; its cache holds the prompt and what the earlier steps wrote."""
    prompt = 16 if bench.is_tiny else PROMPT
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    cached = cache_for(model, StaticCache(config=model.config, max_cache_len=prompt + rounds + 8))
    with torch.no_grad():
        out = model(ids.to(bench.device), use_cache=True, logits_to_keep=1, **cached)
    token = out.logits[:, -1:].argmax(-1)
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model

    @torch.no_grad()
    def step() -> None:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward(token, use_cache=True, **cached).logits
        token.copy_(logits[:, -1:].argmax(-1))

    return step


def _kernels(step: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = (KERNEL.match(event.key) for event in profile.key_averages())
    return sorted({match[1] for match in names if match})


def _in_rounds(bench: Bench, steps: dict[str, Callable[[], object]], tokens: int, rounds: int) -> dict[str, dict]:
    """Return name -> tokens per second; of all but the first also the ratio to it."""
    calls = {name: partial(seconds_of, step, bench.device) for name, step in steps.items()}
    _, _, _, *found = in_rounds(calls, range(rounds + 3))  # the first ones warm up kernels, caches and graphs
    empty_cache(bench.device)
    return common.speeds({name: [tokens / seconds[name] for seconds in found] for name in steps})
