"""Decoding one token at a time: compressed over dense, and the floor that the bare products of both set.

Speed depends on shapes, not on values, so weights are random: a compressed model is made from its config. Steps of all
candidates alternate, so a machine that slows down for a moment slows all; ratios are formed within rounds of one step.

    python benchmarks/decode.py                                # two shapes, batch 1 and 8, about 6 minutes of two cores
    python benchmarks/decode.py --checkpoint small             # the shapes of a compressed checkpoint instead
    python benchmarks/decode.py --compile                      # dense and compressed under torch.compile, static cache
"""

import copy
import itertools
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import common
from pages.costs import settled
from rankfold._utils.evaluating import cache_for
from rankfold._utils.hardware import in_rounds, seconds_of
from rankfold.modules import METHOD_NAME

DEFINITIONS = {
    "decode": "B tokens over the time of one greedy step with a cache that holds the prompt; medians over rounds",
    "matrix products": "the same of all matrices of the model alone, one after the other, on inputs that are given",
    "ratio": "compressed over dense within a round of one step each; median over rounds, in brackets its quartiles",
}
# Dense sizes; widths of queries and keys, of values, and of the MLP that leave 70% of the weights of the blocks.
SHAPES = {
    "SmolLM2-135M": ((576, 1536, 9, 3, 30, 49152), (48, 56, 1000)),
    "Llama-3.2-1B, 4 of 16 blocks": ((2048, 8192, 32, 8, 4, 32000), (48, 56, 5696)),
}


def main() -> None:
    parser = common.arguments(__doc__, "decode")
    parser.add_argument("--checkpoint", help="folder of a compressed model whose shapes are taken")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    config = {"prompt": args.prompt, "rounds": args.rounds, "compile": args.compile}
    record = common.Record(args.json, config, DEFINITIONS)
    for (name, config), dtype in itertools.product(configs(args.checkpoint), args.dtype):
        models = pair(config, getattr(torch, dtype))
        for batch in args.batch:
            found = measure(models, batch, args.prompt, args.rounds, args.compile)
            row = f"{name}, {dtype}, batch {batch}"
            record.add(row, shape=name, dtype=dtype, batch=batch, found=found)
            common.say(f"{row}: " + ", ".join(f"{kind} {settled(each)}" for kind, each in found.items()))
    common.say(f"wrote {common.shown(str(args.json))}")


def configs(checkpoint: str | None):
    """Names, and configs of compressed models."""
    if checkpoint:
        yield Path(checkpoint).name, AutoConfig.from_pretrained(checkpoint)
        return
    for name, (sizes, widths) in SHAPES.items():
        config = common.llama(*sizes, tie_word_embeddings=True)
        config.quantization_config = {"quant_method": METHOD_NAME, "modules": modules_of(config, *widths)}
        yield name, config


def modules_of(config, qk: int, vo: int, width: int) -> dict[str, dict]:
    """Descriptions of the modules of a Llama with these widths in all blocks."""
    D, H, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def linear(inputs: int, outputs: int) -> dict:
        return {"kind": "linear", "in": inputs, "out": outputs, "bias": False}

    attention = {"kind": "attention", "heads": H, "kv_heads": K, "qk_dim": qk, "vo_dim": vo, "rotary_dim": D // H}
    attention |= {"scaling": (D // H) ** -0.5, "selected_pairs": qk < D // H}
    attention |= {"q": linear(D, H * qk), "k": linear(D, K * qk), "v": linear(D, K * vo), "o": linear(H * vo, D)}
    mlp = {"gate_proj": linear(D, width), "up_proj": linear(D, width), "down_proj": linear(width, D)}
    modules = {"self_attn": attention} | {f"mlp.{name}": spec for name, spec in mlp.items()}
    return {f"model.layers.{i}.{path}": spec for i in range(config.num_hidden_layers) for path, spec in modules.items()}


def pair(config, dtype: torch.dtype) -> dict[str, nn.Module]:
    """A dense and a compressed model with random weights."""
    dense = copy.deepcopy(config)
    del dense.quantization_config
    return {
        name: AutoModelForCausalLM.from_config(each, dtype=dtype).eval()
        for name, each in (("dense", dense), ("compressed", config))
    }


@torch.no_grad()
def measure(models: dict[str, nn.Module], batch: int, prompt: int, rounds: int, compiled: bool) -> dict[str, dict]:
    """A row for each model, and for its matrices alone."""
    steps = {name: stepper(model, batch, prompt, rounds, compiled) for name, model in models.items()}
    steps |= {f"matrix products, {name}": products(model, batch) for name, model in models.items()}
    calls = {name: partial(seconds_of, step, torch.device("cpu")) for name, step in steps.items()}
    _, _, *found = in_rounds(calls, range(rounds + 2))  # the first ones warm up caches and kernels
    speeds = {name: [batch / seconds[name] for seconds in found] for name in steps}
    bare = {f"matrix products, {name}": speeds.pop(f"matrix products, {name}") for name in models}
    return common.speeds(speeds) | common.speeds(bare)


def stepper(model: nn.Module, batch: int, prompt: int, rounds: int, compiled: bool):
    """One greedy step of a model; its cache holds the prompt and what the earlier steps wrote."""
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    cache = StaticCache(config=model.config, max_cache_len=prompt + rounds + 2) if compiled else None
    cached = cache_for(model, cache)
    state = {"token": model(ids, use_cache=True, logits_to_keep=1, **cached).logits[:, -1:].argmax(-1)}
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        out = forward(state["token"], use_cache=True, **cached)
        state["token"] = out.logits[:, -1:].argmax(-1)

    return step


def products(model: nn.Module, batch: int):
    """All matrices of a model, one after the other."""
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {m.in_features: torch.randn(batch, 1, m.in_features, dtype=m.weight.dtype) for m in matrices}

    def step() -> None:
        for matrix in matrices:
            nn.functional.linear(inputs[matrix.in_features], matrix.weight)

    return step


if __name__ == "__main__":
    main()
