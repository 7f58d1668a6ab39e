"""Dense against compressed: tokens per second of the blocks alone and of the whole prefill.

decode.py has the tokens after it. Rounds run both models in turning order; the ratio is formed within a round, the
median over rounds is reported. Speed depends on shapes, not on values, so a model that is compressed here for the
purpose is calibrated on little text (16 x 512 tokens).

    python benchmarks/speed.py                                          # SmolLM2-135M, the default method, sparsity 0.3
    python benchmarks/speed.py --model DENSE --compressed SMALL         # two checkpoints
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

import common
from rankfold import compress, load, load_calibration, make_method
from rankfold._utils.hardware import in_rounds, seconds_of
from rankfold.architectures import architecture_of
from rankfold.evaluation.speed import speed

DEFINITIONS = {
    "blocks": "B x T tokens over the time of one forward of all blocks, inputs given, no cache, no embedding, no head",
    "prefill": "B x T prompt tokens over the time of one forward that fills the cache and computes the last logits",
    "ratio": "compressed over dense within a round; median over rounds",
}


def main() -> None:
    parser = common.arguments(__doc__, "speed")
    common.add_model(parser)
    parser.add_argument("--compressed", help="checkpoint of the compressed model; default: compress --model now")
    parser.add_argument("--method", default="rankfold")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--rank-multiple", type=int, default=8)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["1x1024", "8x512"], help="of the blocks' prefill: BATCHxLENGTH")
    parser.add_argument("--batch", type=int, default=8, help="of the whole prefill")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    source = common.open_source(args.model)
    config = {"model": common.describe_model(source), "repeats": args.repeats}
    config["compressed"] = Path(args.compressed).name if args.compressed else None
    if not args.compressed:
        method = make_method(args.method, sparsity=args.sparsity, rank_multiple=args.rank_multiple)
        config["method"] = method.describe()
    record = common.Record(args.json, config, DEFINITIONS)
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        small = args.compressed or make(source, method, Path(folder) / "small")
        for dtype in args.dtypes:
            models = {"dense": load(common.model_path(args.model), dtype=dtype), "compressed": load(small, dtype=dtype)}
            run(record, models, dtype, args)
    common.say(f"wrote {common.shown(str(args.json))}")


def make(source, method, folder: Path) -> Path:
    tokens = load_calibration("pydoc", source, num_samples=16, max_length=min(512, source.context_length))
    return compress(source, method=method, calibration=tokens, output=folder).output


def run(record, models: dict[str, nn.Module], dtype: str, args: argparse.Namespace) -> None:
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        facts = blocks_speed(models, batch, length, args.repeats)
        record.add(f"blocks {shape} {dtype}", kind="blocks", dtype=dtype, batch=batch, length=length, models=facts)
        common.say(f"blocks {shape} {dtype}: x {facts['compressed']['ratio']:.2f}")
    result = speed(models, batch=args.batch, prompt=args.prompt, steps=1, repeats=args.repeats)
    facts = {
        name: {
            "tokens_per_second": m["prefill_tokens_per_second"],
            "ratio": m["prefill_ratio"],
            "range": m["prefill_range"],
        }
        for name, m in result["models"].items()
    }
    row = f"prefill {args.batch}x{args.prompt} {dtype}"
    shape = {"batch": args.batch, "prompt": args.prompt, "length": args.prompt}
    record.add(row, kind="prefill", dtype=dtype, **shape, models=facts)
    common.say(f"{row}: x {facts['compressed']['ratio']:.2f}")


def calls_of(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple[nn.Module, tuple, dict]]]:
    """Input of the first block, and every block with what else the model's own forward calls it with."""
    path = architecture_of(model).blocks
    inputs, calls = [], []

    def note(block, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])
        calls.append((block, args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in model.get_submodule(path)]
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return inputs[0], calls


@torch.no_grad()
def blocks_speed(models: dict[str, nn.Module], batch: int, length: int, repeats: int) -> dict:
    """Tokens per second of all blocks of every model, in paired rounds; the first round is not counted."""
    vocabulary = min(m.config.get_text_config().vocab_size for m in models.values())
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    inputs = {name: calls_of(model, ids) for name, model in models.items()}

    def run(hidden: torch.Tensor, calls: list[tuple[nn.Module, tuple, dict]]) -> None:
        for block, args, kwargs in calls:
            output = block(hidden, *args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output

    steps = {name: partial(seconds_of, partial(run, *given), ids.device) for name, given in inputs.items()}
    _, *rounds = in_rounds(steps, range(repeats + 1))
    speeds = {name: [batch * length / seconds[name] for seconds in rounds] for name in models}
    dense = next(iter(speeds.values()))
    return {name: paired(mine, dense) for name, mine in speeds.items()}


def paired(mine: list[float], reference: list[float]) -> dict:
    ratios = [a / b for a, b in zip(mine, reference, strict=True)]
    return {
        "tokens_per_second": statistics.median(mine),
        "ratio": statistics.median(ratios),
        "range": [min(mine), max(mine)],
    }


if __name__ == "__main__":
    main()
