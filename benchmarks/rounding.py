"""Compressed, rounded to few bits, or both: perplexity against bytes of weights, in PyTorch, so for any family.

Weights are rounded to the formats of llama.cpp that the package `gguf` writes, and back. A killed run goes on.

    python benchmarks/rounding.py --model $RANKFOLD_MODELS/opt-6m
"""

import copy
from pathlib import Path

import gguf
import torch
from torch import Tensor

import common
import rankfold
from rankfold.evaluation.perplexity import perplexity

FORMATS = ("F16", "Q8_0", "Q5_0", "Q4_0")
CALIBRATION = "text/wikitext2-valid.tokens"
MULTIPLE = 32  # of ranks: a block of the formats
DEFINITIONS = {
    "bytes": "of all weights in the format, tied ones once; vectors in fp32, "
    "matrices whose rows are no whole blocks in f16",
    "perplexity": "exp of the mean negative log-likelihood per predicted token, weights rounded to the format and back",
}


def main() -> None:
    parser = common.arguments(__doc__)
    common.add_model(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.set_defaults(length=256)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--text", default="text/opt-6m-val.txt", help="that is evaluated on")
    parser.add_argument("--first", type=int, default=64, help="windows of it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="record to write")
    args = parser.parse_args()
    source = common.open_source(args.model)
    tokens = common.calibration(args, source, CALIBRATION)
    ids = common.windows(source, common.data_file(args.data, args.text), args.length)[: args.first]
    config = {
        "model": common.describe_model(source),
        "calibration": common.describe_tokens(tokens.ids, Path(CALIBRATION).name, tokens.seed),
        "evaluation": common.describe_tokens(ids, Path(args.text).name),
    }
    path = args.json or common.RESULTS / f"rounding_{Path(args.model).stem}.json"
    record = common.Record(path, config, DEFINITIONS, resume=True)
    for sparsity in (0.0, *args.sparsities):
        names = {f"{f'rankfold {sparsity:g}' if sparsity else 'dense'} {form}": form for form in FORMATS}
        if not all(name in record for name in names):
            model = compressed(source, sparsity, tokens) if sparsity else copy.deepcopy(source.whole_model())
            exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            for name, form in names.items():
                if name not in record:
                    size = round_to(model, exact, gguf.GGMLQuantizationType[form])
                    found = perplexity(model, ids)["perplexity"]
                    record.add(name, sparsity=sparsity, format=form, bytes=size, perplexity={"text": found})
                    common.say(f"{name}: {size / 1e6:.2f} MB, {found:.3f}")


def compressed(source, sparsity: float, tokens) -> torch.nn.Module:
    method = rankfold.make_method("rankfold", sparsity=sparsity, rank_multiple=MULTIPLE)
    return rankfold.compress(source, method=method, calibration=tokens).model


def round_to(model: torch.nn.Module, exact: dict[str, Tensor], form: gguf.GGMLQuantizationType) -> int:
    """Round all weights of a model to a format, from what they were, and return the bytes that they take in it."""
    size = 0
    for name, parameter in model.named_parameters():
        values = exact[name].float().numpy()
        taken, rounded = round_trip(values, form)
        size += taken
        parameter.data.copy_(torch.from_numpy(rounded.reshape(values.shape).copy()))
    return size


def round_trip(values, form: gguf.GGMLQuantizationType):
    """Return the bytes that values take in a format, and the values that it gives back."""
    fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[form][0] == 0
    kind = form if fits else gguf.GGMLQuantizationType.F16
    kind = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
    codes = gguf.quants.quantize(values, kind)
    return codes.nbytes, gguf.quants.dequantize(codes, kind)


if __name__ == "__main__":
    main()
