"""Perplexity and speed against bytes in transformers: the dense model and compressed ones, with weights in few bits by
torchao.

Formats are weight-only: int8 (a scale a row), int4 (a scale for 32 weights; packed for CPUs). Embedding and head stay
in bf16, as transformers' TorchAoConfig leaves them. Ranks are those of `--target llama.cpp`, multiples of 32, which
int4 needs, too. A killed run goes on; speeds are of one run over all models.

    pip install --no-deps torchao==0.18.0
    python benchmarks/same_bytes_torchao.py
    python benchmarks/same_bytes_torchao.py --model $RANKFOLD_MODELS/stories260K --windows 4 --rounds 0  # seconds
"""

import itertools
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel

import common
import rankfold
from rankfold.evaluation.perplexity import perplexity
from rankfold.evaluation.speed import PROMPT, STEPS, speed
from same_bytes import CONTEXT, Files, arguments, model_name

GROUP = 32  # weights of int4 with one scale
ROWS = 16  # that int4 packs together
FORMATS = ("BF16", "INT8", "INT4")
DEFINITIONS = {
    "model": "dense, or compressed by the default method with `--target llama.cpp` at a sparsity",
    "bytes": "of all tensors, scales among them, tied ones once; embedding and head in bf16",
    "perplexity": f"exp of the mean negative log-likelihood per predicted token, in windows of {CONTEXT}",
    "fallback": "matrices in bf16: rows or columns are no whole blocks of int4",
}
SPEEDS = {
    "prefill": f"tokens per second of a prompt of {PROMPT}, one sequence, median over rounds",
    "decode": f"tokens per second of {STEPS} tokens one by one, median over rounds",
    "ratio": "over the dense model in BF16, within a round: median over rounds",
}


def main() -> None:
    args = arguments(__doc__, "same_bytes_torchao", FORMATS).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        files = Files(args, args.work or Path(place))
        config = files.describe() | {"torchao": version("torchao")}
        record = common.Record(args.json, config, DEFINITIONS | (SPEEDS if args.rounds else {}), resume=True)
        pairs = itertools.product((0.0, *args.sparsities), args.formats)
        models = {pair: name_of(*pair) for pair in pairs}
        for (sparsity, form), name in models.items():
            if name not in record:
                add(record, files, sparsity, form)
        there = {row["name"]: row for row in record.value["rows"]}
        if args.rounds and not all("prefill" in there[name] for name in models.values()):
            add_speeds(record, files, models, args)
    common.say(f"wrote {common.shown(str(args.json))}")


def name_of(sparsity: float, form: str) -> str:
    return f"{model_name(sparsity)} {form}"


def add(record: common.Record, files: Files, sparsity: float, form: str) -> None:
    """Add the row of one model in one format, without speeds."""
    model, fallback = in_format(files.folder(sparsity), form)
    found = {}
    for text, path in files.texts.items():
        ids = common.windows(files.source, path, CONTEXT)[: files.args.windows]
        found[text] = perplexity(model, ids)["perplexity"]
    facts = {"model": model_name(sparsity), "sparsity": sparsity, "format": form, "bytes": bytes_of(model)}
    record.add(name_of(sparsity, form), **facts, fallback=fallback, perplexity=found)
    common.say(f"{name_of(sparsity, form)}: {facts['bytes'] / 1e6:.1f} MB, {found}")


def in_format(folder: Path, form: str) -> tuple[PreTrainedModel, int]:
    """Return a model with its weights in a format, and how many of its matrices stay in bf16."""
    model = rankfold.load(folder, dtype="bfloat16", device="cpu")
    head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]
    taken = {"BF16": [], "INT8": layers, "INT4": [layer for layer in layers if packs(layer)]}[form]
    config = Int8WeightOnlyConfig() if form == "INT8" else PrototypeInt4WeightOnlyConfig(group_size=GROUP)
    quantize_(model, config, filter_fn=lambda layer, _: any(layer is one for one in taken))
    return model, 0 if form == "BF16" else len(layers) - len(taken)


def packs(layer: nn.Linear) -> bool:
    """Return whether torchao can pack a matrix in int4 for a CPU."""
    return layer.in_features % GROUP == 0 and layer.out_features % ROWS == 0


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all tensors of a model, tied ones once."""
    parts = [part for tensor in itertools.chain(model.parameters(), model.buffers()) for part in parts_of(tensor)]
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor of torchao holds."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def add_speeds(record: common.Record, files: Files, names: dict[tuple[float, str], str], args) -> None:
    """Measure all models in turn, the dense one in bf16 first, and add what is found to their rows."""
    models = {name: in_format(files.folder(sparsity), form)[0] for (sparsity, form), name in names.items()}
    found = speed(models, batch=1, repeats=args.rounds)["models"]
    there = {row["name"]: row for row in record.value["rows"]}
    for name, facts in found.items():
        record.drop(name)
        speeds = {
            key: facts[f"{what}_{of}"]
            for what in ("prefill", "decode")
            for key, of in ((what, "tokens_per_second"), (f"{what} ratio", "ratio"))
        }
        record.add(**there[name] | {"rounds": args.rounds, "threads": args.threads} | speeds)


if __name__ == "__main__":
    main()
