"""Parameters and multiply-accumulates against sparsity, as in Table 3 of LatentLLM (arXiv:2505.18413), and the cache.

Two kinds of rows. `counted`: a model of a few random blocks is really compressed; PyTorch counts its operations, and
the count must equal the closed formula and the plan, or the script fails. `planned`: the same formula for large models,
from their shapes alone, without a weight in memory. Compressing is fast because ranks depend on shapes only.

    python benchmarks/complexity.py
"""

import sys

import torch
import transformers

import common
from rankfold import CalibrationData, DenseModel, calibrate, compress, make_method, open_model, plan
from rankfold.errors import OptionError
from rankfold.evaluation.complexity import DEFINITION, cache_bytes, counted_macs, formula_macs, planned_macs

SPARSITIES = [round(0.1 * i, 1) for i in range(10)]
DEFINITIONS = {
    "macs_per_token": DEFINITION,
    "parameters": "of the compressed model, biases included, a tied matrix once",
    "kv_bytes_per_token": "bytes the cache grows by with every token, all blocks, in the dtype of the weights",
    "removed": "reached: weights removed over linear weights of the blocks",
    "counted_macs": "of the compressed model, by torch.utils.flop_counter, over all T tokens",
}


def opt(width: int, layers: int, heads: int, hidden: int, vocabulary: int) -> transformers.OPTConfig:
    return transformers.OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )


SMALL = {  # really compressed and counted
    "opt, 2 blocks of d = 256": lambda: opt(256, 2, 8, 1024, 4096),
    "llama, 2 blocks of d = 192, GQA 3/1": lambda: common.llama(192, 512, 3, 1, 2, 4096, tie_word_embeddings=True),
}
LARGE = {  # shapes only
    "opt-6.7b": lambda: opt(4096, 32, 32, 16384, 50272),
    "llama-2-7b": lambda: common.llama(4096, 11008, 32, 32, 32, 32000, tie_word_embeddings=False),
    "smollm2-135m": lambda: common.llama(576, 1536, 9, 3, 30, 49152, tie_word_embeddings=True),
}


def main() -> None:
    parser = common.arguments(__doc__, "complexity")
    parser.add_argument("--tokens", type=int, default=128, help="T; 128 as in the paper")
    parser.add_argument("--methods", nargs="+", default=["modegpt", "latentllm"])
    parser.add_argument("--sparsity", type=float, nargs="+", default=SPARSITIES)
    parser.add_argument("--small-only", action="store_true", help="without the large models")
    args = parser.parse_args()
    config = {"tokens": args.tokens, "methods": args.methods, "seed": 0}
    record, wrong = common.Record(args.json, config, DEFINITIONS), []
    for name, make in SMALL.items():
        torch.manual_seed(0)
        source = open_model(transformers.AutoModelForCausalLM.from_config(make()), device="cpu")
        ids = torch.randint(4096, (8, args.tokens), generator=torch.Generator().manual_seed(0))
        moments = calibrate(source, CalibrationData(ids, "random", "random", 0))
        for method, sparsity in grid(args):
            wrong += add(record, name, source, method, sparsity, args.tokens, moments)
    for name, make in {} if args.small_only else LARGE.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(make(), dtype=torch.float16)
        source = DenseModel(model, name, torch.device("cpu"), torch.float16, None)
        for method, sparsity in grid(args):
            add(record, name, source, method, sparsity, args.tokens)
    common.say(f"wrote {common.shown(str(args.json))}")
    if wrong:
        sys.exit("the counter, the formula and the plan disagree: " + "; ".join(wrong))


def grid(args):
    return [(method, sparsity) for method in args.methods for sparsity in args.sparsity]


def add(record, name: str, source, method: str, sparsity: float, tokens: int, moments=None) -> list[str]:
    """One row; the names of rows whose three numbers differ."""
    row = f"{name} {method} {sparsity}"
    facts = {"model": name, "method": method, "sparsity": sparsity}
    chosen = make_method(method, sparsity=sparsity)
    try:
        planned = plan(source, method=chosen)
    except OptionError as error:  # a sparsity out of reach is a result
        record.add(row, **facts, error=str(error))
        common.say(f"{row}: {error}")
        return []
    macs = planned_macs(source, planned, tokens)
    facts |= {
        "kind": "planned",
        "removed": planned.sparsity,
        "parameters": planned.parameters_after,
        "macs_per_token": macs["total"] / tokens,
        "flops_per_token": 2 * macs["total"] / tokens,
        "linear_macs_per_token": macs["linear"] / tokens,
        "attention_macs_per_token": macs["attention"] / tokens,
        "kv_bytes_per_token": planned.kv_bytes_per_token_after,
    }
    equal = True
    if moments is not None:
        model = compress(source, method=chosen, moments=moments).model
        measured = {
            "counted_macs": counted_macs(model, tokens),
            "counted_parameters": sum(p.numel() for p in model.parameters()),
            "counted_kv_bytes_per_token": cache_bytes(model),
        }
        equal = (
            measured["counted_macs"] == macs["total"] == formula_macs(model, tokens)["total"]
            and measured["counted_parameters"] == facts["parameters"]
            and measured["counted_kv_bytes_per_token"] == facts["kv_bytes_per_token"]
        )
        facts |= {"kind": "counted", **measured, "equal": equal}
    record.add(row, **facts)
    common.say(f"{row}: {facts['macs_per_token'] / 1e6:,.2f} M MACs a token" + ("" if equal else ", COUNTS DIFFER"))
    return [] if equal else [row]


if __name__ == "__main__":
    main()
