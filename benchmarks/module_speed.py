"""What compressing one kind of module alone buys in tokens per second, prefill and decode: MoDeGPT's Table 30.

Every module loses a share of its own weights; the last row compresses all three. At one sparsity all of them and the dense
model run in turning order, so that ratios are formed within a round. Speed depends on shapes, not on values, so the models are
calibrated on little text.

    python benchmarks/module_speed.py
    python benchmarks/module_speed.py --sparsity 0.3 --dtypes float32
"""

import tempfile
from pathlib import Path

import common
from rankfold import load, make_method
from rankfold.evaluation.speed import DEFINITION, speed
from speed import make
from studies_table import table as crossed

METHOD = "modegpt"
MODULES = {"mlp": ("mlp",), "qk": ("qk",), "vo": ("vo",), "all": ("mlp", "qk", "vo")}
KINDS = ("prefill", "decode")
DEFINITIONS = {
    "sparsity": "share of its own weights that a module loses, in every block",
    "prefill, decode": DEFINITION,
    "ratio": "compressed over dense within a round; median over rounds",
}


def main() -> None:
    parser = common.arguments(__doc__, "module_speed_smollm2")
    common.add_model(parser)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    source = common.open_source(args.model)
    options = {name: getattr(args, name) for name in ("batch", "prompt", "steps", "repeats")}
    config = {"model": common.describe_model(source), "method": METHOD, "speed": options}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for sparsity in args.sparsity:
        wanted = [dtype for dtype in args.dtypes if f"{dtype} {sparsity}" not in record]
        if wanted:
            measure(record, source, sparsity, wanted, args, options)
    common.say(f"wrote {common.shown(str(args.json))}")


def measure(record, source, sparsity: float, dtypes: list[str], args, options: dict) -> None:
    """The rows of one sparsity."""
    methods = {name: make_method(METHOD, modules=dict.fromkeys(modules, sparsity)) for name, modules in MODULES.items()}
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        small = {name: make(source, method, Path(folder) / name) for name, method in methods.items()}
        for dtype in dtypes:
            models = {"dense": load(common.model_path(args.model), dtype=dtype)}
            models |= {name: load(path, dtype=dtype) for name, path in small.items()}
            found = speed(models, **options)["models"]
            record.add(f"{dtype} {sparsity}", dtype=dtype, sparsity=sparsity, models=found)
            ratios = ", ".join(f"{name} x {found[name]['prefill_ratio']:.2f}" for name in small)
            common.say(f"{dtype} {sparsity}: prefill {ratios}")


def table(record: dict) -> list[str]:
    """For every precision, prefill and decode: modules by sparsity."""
    options, lines = record["config"]["speed"], []
    lines += [
        f"`{record['config']['method']}`; {options['batch']} x {options['prompt']} tokens of prefill, then {options['steps']} "
        f"steps; {options['repeats']} rounds. Tokens per second, and over the dense model's.",
        "",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in record["rows"]):
        for kind in KINDS:
            rows = [row for row in record["rows"] if row["dtype"] == dtype]
            cells = {
                (name, f"{row['sparsity']:.0%}"): cell(row["models"][name], kind)
                for row in rows
                for name in ("dense", *MODULES)
            }
            lines += [f"### {kind}, {dtype}", "", *crossed(cells), ""]
    return lines


def cell(found: dict, kind: str) -> str:
    low, high = found[f"{kind}_range"]
    return f"{found[f'{kind}_tokens_per_second']:,.0f} [{low:,.0f}, {high:,.0f}] × {found[f'{kind}_ratio']:.2f}"


if __name__ == "__main__":
    main()
