"""The time that a plan estimates over the time that the compression takes, for every method.

On random Llamas with a narrow and a wide MLP, and, as `qwen`, on a few blocks of the shapes of Qwen2 with 1.5 B
parameters. Run it on a quiet machine: both sides are wall time.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers as t

import common
from pages.costs import CLOSE, is_close
from rankfold import CalibrationData, DenseModel, compress, make_method, open_model
from rankfold.compression.duration import estimated_seconds
from rankfold.methods import method_class, method_names
from rankfold.report.record import read_record

DEFINITIONS = {
    "said": "seconds that the plan estimates, by part; rates of the machine are measured anew for every method",
    "estimating": "seconds that making the estimate takes",
    "needed": "seconds of compress() after the plan was made, by part of the run record",
    "ratio": "total said over total needed; wanted: 1/1.5 to 1.5",
}
# width, hidden units, heads, key/value heads, blocks
SHAPES = {
    "narrow": (256, 704, 8, 4, 4),
    "wide": (256, 4096, 4, 2, 3),
    "qwen": (1536, 8960, 12, 2, 2),
}
SPARSITY = {"wanda": 0.5, "sparsegpt": 0.5, "pruner-zero": 0.5}
VOCABULARY = 4096


def main() -> None:
    parser = common.arguments(__doc__, "plan_time")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["narrow", "wide"])
    known = [name for name in method_names() if not method_class(name).needs_experts]
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    config = {
        "samples": args.samples,
        "length": args.length,
        "vocabulary": VOCABULARY,
        "threads": torch.get_num_threads(),
    }
    record = common.Record(args.json, config | {"shapes": SHAPES}, DEFINITIONS, resume=True)
    for shape in args.shapes:
        for name in args.methods:
            if f"{shape} {name}" not in record:
                facts = measure(shape, name, args.samples, args.length)
                record.add(f"{shape} {name}", shape=shape, method=name, **facts)
                common.say(
                    f"{shape} {name}: said {sum(facts['said'].values()):.1f} s, needed {facts['needed']['total']:.1f} "
                    f"s, ratio {facts['ratio']:.2f}"
                )
    wrong = [row["name"] for row in record.value["rows"] if not is_close(row["ratio"])]
    common.say(f"outside of a factor of {CLOSE}: {', '.join(wrong) or 'none'}")


def measure(shape: str, name: str, samples: int, length: int) -> dict:
    """Estimate and compress, in that order."""
    source, tokens = opened(shape, length), random_tokens(samples, length)
    method, told = make_method(name, sparsity=SPARSITY.get(name, 0.4)), {}

    def estimate(plan) -> None:
        begin = time.perf_counter()
        told["said"] = estimated_seconds(plan, source, tokens.describe(), method.modes[0])
        told["estimating"] = time.perf_counter() - begin

    folder = Path(tempfile.mkdtemp())
    try:
        compress(
            source, method=method, calibration=tokens, output=folder / "small", mode=method.modes[0], on_plan=estimate
        )
        needed = read_record(folder / "small")["run"]["seconds"]
    finally:
        shutil.rmtree(folder)
    needed["total"] -= told["estimating"]
    needed["other"] -= told["estimating"]
    return {**told, "needed": needed, "ratio": sum(told["said"].values()) / needed["total"]}


def opened(shape: str, length: int) -> DenseModel:
    """A random Llama."""
    torch.manual_seed(0)
    config = common.llama(*SHAPES[shape], VOCABULARY, max_position_embeddings=length, tie_word_embeddings=True)
    return open_model(t.LlamaForCausalLM(config), device="cpu")


def random_tokens(samples: int, length: int) -> CalibrationData:
    ids = torch.randint(
        VOCABULARY, (samples + max(2, samples // 8), length), generator=torch.Generator().manual_seed(0)
    )
    return CalibrationData(ids[:samples], "random", "random", 0, held_out=ids[samples:])


if __name__ == "__main__":
    sys.exit(main())
