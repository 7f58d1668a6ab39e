"""Whether one block is all that is resident: peak memory of compressing a streamed model of many blocks.

A random Llama is written as sharded safetensors into a temporary folder and compressed in a process of its own. Its peak
resident set, minus what it held after the imports, minus the residual stream and one output shard, is compared with three
times the largest block and its moments. The bound does not grow with the number of blocks; the model does.

    python benchmarks/memory.py                                   # 24 blocks of d = 1024, F = 2816
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import common
from rankfold import CalibrationData, compress, make_method, open_model
from rankfold.allocation import tensor_bytes
from rankfold.calibration.runner import measure, start
from rankfold.report.record import peak_memory_bytes, process_status

FACTOR = 3.0
DEFINITIONS = {
    "baseline_bytes": "resident set after the imports",
    "peak_bytes": "largest resident set until the checkpoint is finished",
    "stream_bytes": "residual stream of all calibration tokens",
    "shard_bytes": "largest output shard of a block",
    "block_bytes": "largest block in the compute precision",
    "moments_bytes": "fp64 sums that the method needs of one block",
    "ratio": "(peak - baseline - stream - shard) / (block + moments); target: at most 3",
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
    parser.add_argument("--method", default="modegpt")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--modes", nargs="+", default=["sequential", "one-pass"])
    parser.add_argument(
        "--mmap-threshold", type=int, metavar="BYTES", help="glibc's MALLOC_MMAP_THRESHOLD_; default: its own rule"
    )
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args, *args.worker)))
        return
    hidden = ("json", "worker", "modes")
    record = common.Record(args.json, {k: v for k, v in vars(args).items() if k not in hidden}, DEFINITIONS)
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        write_model(args, Path(folder) / "model")
        for mode in args.modes:
            own = [sys.executable, __file__, *sys.argv[1:], "--worker", folder, mode]
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, env=environment(args))
            facts = json.loads(done.stdout)
            record.add(mode, **facts)
            common.say(f"{mode}: {facts['ratio']:.2f} x (largest block + its moments), target {FACTOR}")
    common.say(f"wrote {common.shown(str(args.json))}")


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Of the process that is measured. By default glibc keeps freed blocks of up to 32 MiB on its heap."""
    own = {"MALLOC_MMAP_THRESHOLD_": str(args.mmap_threshold)} if args.mmap_threshold else {}
    return os.environ | own


def write_model(args: argparse.Namespace, folder: Path) -> None:
    """Random weights, several shards."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.hidden,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=512,
        max_position_embeddings=args.length,
    )
    model = transformers.LlamaForCausalLM(config)
    size = tensor_bytes(model)
    model.save_pretrained(folder, max_shard_size=max(size // 8, 2**20))
    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))  # checkpoints carry one; it is not used
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    common.say(f"model of {size / 2**20:,.0f} MiB in {len(list(folder.glob('*.safetensors')))} shards")


def worker(args: argparse.Namespace, folder: str, mode: str) -> dict:
    """Compress, in this process alone, and say what it held."""
    baseline = resident()
    source = open_model(Path(folder) / "model", device="cpu")
    method = make_method(args.method, sparsity=args.sparsity)
    ids = torch.randint(512, (args.samples, args.length), generator=torch.Generator().manual_seed(0))
    output = compress(
        source,
        method=method,
        calibration=CalibrationData(ids, "random", "random", 0),
        output=Path(folder) / f"small-{mode}",
        mode=mode,
    ).output
    peak = peak_memory_bytes()
    shards = [path.stat().st_size for path in output.glob("model-*.safetensors")]
    blocks = [sum(p.numel() for p in block.parameters()) for block in source.blocks]
    item = torch.empty((), dtype=source.compute_dtype).element_size()
    view = source.block(0)
    stream = start(source, ids[:1], autocast=source.autocast)
    found = measure(view, stream, method.statistics(view), step=False)
    parts = (getattr(m, part) for m in found.values() for part in ("total", "absolute", "second"))
    facts = {
        "mode": mode,
        "precision": common.precision(source),
        "baseline_bytes": baseline,
        "peak_bytes": peak,
        "stream_bytes": sum(h.nbytes for h in stream.hidden) * args.samples,
        "shard_bytes": max(shards),
        "block_bytes": max(blocks) * item,
        "moments_bytes": sum(t.nbytes for t in parts if t is not None),
        "model_bytes": sum(path.stat().st_size for path in (Path(folder) / "model").glob("*.safetensors")),
    }
    above = peak - baseline - facts["stream_bytes"] - facts["shard_bytes"]
    ratio = above / (facts["block_bytes"] + facts["moments_bytes"])
    return facts | {"ratio": ratio, "target": FACTOR, "met": ratio <= FACTOR}


def reset_peak() -> None:
    """Forget the peak so far, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    """Resident set now; where the system does not tell, the largest so far."""
    return process_status("VmRSS") or peak_memory_bytes()


if __name__ == "__main__":
    main()
