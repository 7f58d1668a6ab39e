"""What fp32 sums of several batches cost in a moment: hardly more than one batch has cost already.

The moment of an MLP's hidden activations is a sum of products over batches. Sums of a batch are fp32, as the matrix
product makes them; beyond `FP32_ROWS` rows they are fp64. The error against the exact fp64 moment of the same
activations is given in units of the ridge that the compression adds, for fp64 after every batch, for the setting
shipped, and for fp32 throughout.

    python benchmarks/moment_precision.py                      # SmolLM2-135M, 32 x 1024 tokens
"""

import statistics

import torch

import common
from rankfold.calibration import moments as precision
from rankfold.calibration.runner import BATCH_TOKENS, advance, start
from rankfold.data.load import load_calibration
from rankfold.methods import make_method

DEFINITIONS = {
    "largest": "largest absolute activation",
    "smallest_eigenvalue": "of the exact moment, over the ridge",
    "errors": "rows summed in fp32 -> spectral norm of (moment - exact moment), over the ridge",
}


def main() -> None:
    parser = common.arguments(__doc__, "moment_precision")
    common.add_model(parser)
    common.add_windows(parser)
    parser.add_argument("--text", default="pydoc")
    args = parser.parse_args()

    source = common.open_source(args.model)
    tokens = load_calibration(args.text, source, num_samples=args.samples, max_length=args.length, seed=args.seed)
    ridge = make_method("modegpt", sparsity=0.3).ridge
    settings = {"a batch": BATCH_TOKENS, "shipped": precision.FP32_ROWS, "all": tokens.ids.numel()}
    config = {
        "model": common.describe_model(source),
        "tokens": common.describe_tokens(tokens.ids, args.text, args.seed),
        "autocast": str(source.autocast),
        "ridge": ridge,
        "fp32_rows": settings,
    }
    record = common.Record(args.json, config, DEFINITIONS)
    stream = start(source, tokens.ids, autocast=source.autocast)
    for index in range(len(source)):
        view = source.block(index)
        record.add(view.path, **errors(hidden(view, stream), ridge, settings))
        common.say(f"{view.path}: {record.value['rows'][-1]['errors']}")
    for name in settings:
        common.say(f"{name}: median {statistics.median(row['errors'][name] for row in record.value['rows']):.3f}")
    common.say(f"wrote {common.shown(str(args.json))}")


def hidden(view, stream) -> list[torch.Tensor]:
    """Inputs of the down projection, batch by batch; the stream moves on."""
    batches = []
    down = view.module.get_submodule(view.mlp.spec.down)
    hook = down.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].flatten(0, -2)))
    advance(view, stream)
    hook.remove()
    return batches


def errors(batches: list[torch.Tensor], ridge: float, settings: dict[str, int]) -> dict:
    """Facts of one block."""
    rows = torch.cat(batches).double()
    exact = rows.T @ rows
    unit = ridge * exact.diagonal().mean()
    found = {}
    for name, limit in settings.items():
        precision.FP32_ROWS = limit
        moment = precision.VectorMoment()
        for batch in batches:
            moment.add(batch)
        found[name] = (torch.linalg.eigvalsh(moment.finish().second - exact).abs().max() / unit).item()
    return {
        "largest": rows.abs().max().item(),
        "smallest_eigenvalue": (torch.linalg.eigvalsh(exact)[0] / unit).item(),
        "errors": found,
    }


if __name__ == "__main__":
    main()
