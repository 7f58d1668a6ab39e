"""Whether only one block is resident, and whether plans say how much: peak memory of compressing a streamed model.

A random Llama is written as sharded safetensors into a temporary folder and compressed in a process of its own. Its
peak resident set, minus what a tiny compression by the same method leaves, the residual stream and one output shard, is
compared with three times the largest block and its moments. The bound does not grow with the number of blocks; the
model does. By how much the process grows beyond that tiny compression is compared with the plan's estimate, which is of
tensors: with `--mmap-threshold` glibc gives back what is freed, as it does by itself from 32 MiB on.

    python benchmarks/memory.py --methods rankfold modegpt latentllm --modes sequential --blocks 3 --held-out 2 \\
        --mmap-threshold 65536
    python benchmarks/memory.py --methods all --blocks 2 --width 256 --hidden 2048 --heads 4 --length 256 \\
        --held-out 2 --mmap-threshold 65536 --json benchmarks/results/memory_methods.json
    python benchmarks/memory.py --methods modegpt rankfold --modes sequential --blocks 2 --first 1 --width 4096 \\
        --hidden 11008 --heads 32 --samples 2 --held-out 1 --dtype bfloat16 --json benchmarks/results/memory_7b.json
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import common
from rankfold import CalibrationData, compress, make_method, open_model
from rankfold._utils.memory import release_memory
from rankfold.allocation import tensor_bytes
from rankfold.calibration.observers import DenseBatch
from rankfold.calibration.runner import advance_dense, measure, start
from rankfold.calibration.statistics import dense_inputs
from rankfold.methods import method_names
from rankfold.methods.registry import method_class
from rankfold.report.record import peak_memory_bytes, process_status

FACTOR = 3.0
SPARSITY = dict.fromkeys(("sparsegpt", "wanda", "pruner-zero"), 0.5)
DEFINITIONS = {
    "baseline_bytes": "resident set after the imports",
    "warm_bytes": "resident set after a tiny compression by the same method: the program and its libraries",
    "planned_bytes": "the plan's estimate of the peak beside the program",
    "planned": "planned_bytes over peak_bytes - warm_bytes; target: 0.9 to 1.3",
    "peak_bytes": "largest resident set until the checkpoint is finished",
    "stream_bytes": "residual stream of all calibration tokens",
    "shard_bytes": "largest output shard of a block",
    "block_bytes": "largest block in the compute precision",
    "moments_bytes": "fp64 sums that the method needs of one block",
    "ratio": "(peak - warm - stream - shard) / (block + moments); target: at most 3",
    "model_bytes": "all weights on disk: what loading the whole model would take at least",
}


def main() -> None:
    parser = common.arguments(__doc__, "memory")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=0, help="more samples that nothing is fitted to")
    parser.add_argument("--methods", nargs="+", default=["modegpt"], help="names, or all: each in its first mode")
    parser.add_argument("--sparsity", type=float, default=0.3, help="of the blocks that are compressed")
    parser.add_argument("--first", type=int, help="compress only the first of the blocks, so many; default: all")
    parser.add_argument("--dtype", default="float32", help="of the weights on disk")
    parser.add_argument("--modes", nargs="+", default=["sequential", "one-pass"])
    parser.add_argument(
        "--mmap-threshold", type=int, metavar="BYTES", help="glibc's MALLOC_MMAP_THRESHOLD_; default: its own rule"
    )
    parser.add_argument("--offload", type=Path, metavar="FOLDER", help="keep hidden states in a file there")
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "METHOD", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args, *args.worker)))
        return
    hidden = ("json", "worker", "modes", "offload")
    record = common.Record(args.json, {k: v for k, v in vars(args).items() if k not in hidden}, DEFINITIONS)
    runs = [(method, mode) for method in args.methods for mode in args.modes]
    if args.methods == ["all"]:
        classes = {name: method_class(name) for name in method_names()}
        runs = [(name, cls.modes[0]) for name, cls in classes.items() if not cls.needs_experts]
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        write_model(args, Path(folder) / "model")
        for method, mode in runs:
            name = f"{method} {mode}"
            own = [sys.executable, __file__, *sys.argv[1:], "--worker", folder, method, mode]
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, env=environment(args))
            facts = json.loads(done.stdout)
            record.add(name, method=method, **facts)
            common.say(
                f"{name}: {facts['ratio']:.2f} x (largest block + its moments), target {FACTOR}; "
                f"plan {facts['planned']:.2f} x"
            )
    common.say(f"wrote {common.shown(str(args.json))}")


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Of the process that is measured. By default glibc keeps freed blocks of up to 32 MiB on its heap."""
    own = {"MALLOC_MMAP_THRESHOLD_": str(args.mmap_threshold)} if args.mmap_threshold else {}
    return os.environ | own


def write_model(args: argparse.Namespace, folder: Path) -> None:
    """Random weights, several shards."""
    torch.manual_seed(0)
    sizes = args.width, args.hidden, args.heads, args.heads, args.blocks, 512
    config = common.llama(*sizes, max_position_embeddings=args.length)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    size = tensor_bytes(model)
    model.save_pretrained(folder, max_shard_size=max(size // 8, 2**20))
    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))  # checkpoints carry one; probe texts are all unknown
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    common.say(f"model of {size / 2**20:,.0f} MiB in {len(list(folder.glob('*.safetensors')))} shards")


def worker(args: argparse.Namespace, folder: str, name: str, mode: str) -> dict:
    """Compress, in this process alone, and say what it held."""
    baseline, sparsity = resident(), SPARSITY.get(name, args.sparsity)
    compress(tiny_model(), method=make_method(name, sparsity=sparsity), calibration=tokens(args, 8), mode=mode)
    method = make_method(name, sparsity=sparsity)
    if args.first:
        dense = tuple(range(args.first, args.blocks))
        method = make_method(name, sparsity=sparsity * args.first / args.blocks, exclude_blocks=dense)
    release_memory()
    reset_peak()
    warm = resident()
    source = open_model(Path(folder) / "model", device="cpu", offload=args.offload)
    ids = tokens(args, args.length).ids
    output = Path(folder) / f"small-{name}-{mode}"
    result = compress(source, method=method, calibration=tokens(args, args.length), output=output, mode=mode)
    peak = peak_memory_bytes()
    shards = [path.stat().st_size for path in output.glob("model-*.safetensors")]
    shutil.rmtree(output)
    blocks = [sum(p.numel() for p in block.parameters()) for block in source.blocks]
    item = source.compute_dtype.itemsize
    view = source.block(0)
    stream = start(source, ids[:1], autocast=source.autocast)
    dense: list[DenseBatch] = []
    statistics = method.statistics(view)
    advance_dense(view, stream.copy(), dense.append, dense_inputs(statistics))
    found = measure(view, stream, statistics, step=False, dense=dense)
    parts = (getattr(m, part, None) for m in found.values() for part in ("total", "absolute", "second"))
    facts = {
        "mode": mode,
        "offload": result.record["run"]["offload"],
        "precision": common.precision(source),
        "baseline_bytes": baseline,
        "warm_bytes": warm,
        "peak_bytes": peak,
        "planned_bytes": result.plan.peak_memory_bytes,
        "planned": result.plan.peak_memory_bytes / (peak - warm),
        "stream_bytes": sum(h.nbytes for h in stream.hidden) * args.samples,
        "shard_bytes": max(shards),
        "block_bytes": max(blocks) * item,
        "moments_bytes": sum(t.nbytes for t in parts if t is not None),
        "model_bytes": sum(path.stat().st_size for path in (Path(folder) / "model").glob("*.safetensors")),
    }
    above = peak - warm - facts["stream_bytes"] - facts["shard_bytes"]
    ratio = above / (facts["block_bytes"] + facts["moments_bytes"])
    return facts | {"ratio": ratio, "target": FACTOR, "met": ratio <= FACTOR}


def tokens(args: argparse.Namespace, length: int) -> CalibrationData:
    """Random samples, some of them held out."""
    ids = torch.randint(512, (args.samples + args.held_out, length), generator=torch.Generator().manual_seed(0))
    held_out = ids[args.samples :] if args.held_out else None
    return CalibrationData(ids[: args.samples], "random", "random", 0, held_out=held_out)


def tiny_model() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(common.llama(32, 64, 4, 4, blocks=3, vocabulary=512))


def reset_peak() -> None:
    """Forget the peak so far, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    """Resident set now; where the system does not tell, the largest so far."""
    return process_status("VmRSS") or peak_memory_bytes()


if __name__ == "__main__":
    main()
