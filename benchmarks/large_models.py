"""Memory and time of compressing large models, computed from their configs; nothing of it was measured.

Memory is the estimate of `rankfold plan`, time that of its table of cards (src/rankfold/compression/cards.json).

    python benchmarks/large_models.py
"""

import transformers

import common
import rankfold
from rankfold.compression.cards import known_cards

DEFINITIONS = {
    "parameters, parameters_after": "of the whole model",
    "bytes_after": "of the checkpoint, in bf16",
    "peak_bytes": "number of accelerators -> peak memory of the one that takes most (estimate of the plan)",
    "minutes": "number of accelerators -> minutes from an open model to a checkpoint, at predicted rates of an H100",
    "advice": "what the plan says where one accelerator of 80 GB is too small",
}
LLAMAS = {  # width, hidden units, blocks, heads, key/value heads, vocabulary
    "Llama 7B": (4096, 11008, 32, 32, 32, 32000),
    "Llama 13B": (5120, 13824, 40, 40, 40, 32000),
    "Llama 70B": (8192, 28672, 80, 64, 8, 128256),
    "Llama 405B": (16384, 53248, 126, 128, 8, 128256),
}
METHODS = ("rankfold", "modegpt", "latentllm")
CARD, COUNTS, SPARSITY = "h100", (1, 8), 0.3


def main() -> None:
    args = common.arguments(__doc__, "large_models").parse_args()
    card = known_cards()[CARD]
    config = {
        "sparsity": SPARSITY,
        "gpu": CARD,
        "gigabytes": card.gigabytes,
        "rates_are_measured": card.is_measured,
        "samples": 128,
        "length": 2048,
    }
    record = common.Record(args.json, config, DEFINITIONS)
    for name, model in configs().items():
        for method in METHODS:
            record.add(f"{name} {method}", model=name, method=method, **row(model, method))
            common.say(f"{name} {method}: {record.value['rows'][-1]['peak_bytes']}")


def configs() -> dict[str, transformers.PretrainedConfig]:
    """Return the configs by name."""
    settings = {"max_position_embeddings": 4096, "dtype": "bfloat16"}
    found = {
        name: common.llama(width, hidden, heads, kv_heads, blocks, vocabulary, **settings)
        for name, (width, hidden, blocks, heads, kv_heads, vocabulary) in LLAMAS.items()
    }
    return found | {"DeepSeek-V3": transformers.DeepseekV3Config(dtype="bfloat16")}


def row(config: transformers.PretrainedConfig, method: str) -> dict:
    """Return what the plans of one model say; an error where the method does not take it."""
    try:
        plans = {n: rankfold.plan(config, SPARSITY, method=method, gpu=CARD, gpus=n) for n in COUNTS}
    except rankfold.RankfoldError as error:
        return {"error": str(error), "peak_bytes": None}
    one = plans[COUNTS[0]]
    return {
        "parameters": one.parameters,
        "parameters_after": one.parameters_after,
        "bytes_after": one.bytes_after,
        "peak_bytes": {str(n): plan.peak_memory_bytes for n, plan in plans.items()},
        "minutes": {str(n): (plan.seconds or 0.0) / 60 for n, plan in plans.items()},
        "advice": (one.hardware or {})["advice"],
    }


if __name__ == "__main__":
    main()
