"""What compressing one kind of module alone buys in tokens per second, prefill and decode: MoDeGPT's Table 30.

Every module loses a share of its own weights; the last row compresses all three. At one sparsity all of them and the dense
model run in turning order, in as many rounds as it takes (see settled_speed.py). Speed depends on shapes, not on values, so the
models are calibrated on little text.

    python benchmarks/module_speed.py                                   # about 8 minutes of two cores
    python benchmarks/module_speed.py --sparsity 0.2 0.3 0.4 0.5 --dtypes float32 bfloat16
"""

import tempfile
from pathlib import Path

import common
import settled_speed
from rankfold import load, make_method
from settled_speed import KINDS, cell
from speed import make
from studies_table import table as crossed

METHOD = "modegpt"
MODULES = {"mlp": ("mlp",), "qk": ("qk",), "vo": ("vo",), "all": ("mlp", "qk", "vo")}
DEFINITIONS = {"sparsity": "share of its own weights that a module loses, in every block"} | settled_speed.DEFINITIONS


def main() -> None:
    parser = common.arguments(__doc__, "module_speed_smollm2")
    common.add_model(parser)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    settled_speed.add_arguments(parser)
    args = parser.parse_args()
    source = common.open_source(args.model)
    options = settled_speed.options_of(args)
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
            found = settled_speed.measure(models, **options)
            record.add(f"{dtype} {sparsity}", dtype=dtype, sparsity=sparsity, **found)
            ratios = ", ".join(f"{name} {cell(found['models'][name]['prefill'])}" for name in small)
            common.say(f"{dtype} {sparsity}: prefill {ratios}")


def table(record: dict) -> list[str]:
    """For every precision, prefill and decode: modules by sparsity."""
    options, lines = record["config"]["speed"], []
    lines += [
        f"`{record['config']['method']}`; {options['batch']} x {options['prompt']} tokens of prefill, then {options['steps']} "
        f"steps; {rounds_of(record)} rounds. Tokens per second, over the dense model's, and the quartiles of that.",
        "",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in record["rows"]):
        for kind in KINDS:
            rows = [row for row in record["rows"] if row["dtype"] == dtype]
            cells = {
                (name, f"{row['sparsity']:.0%}"): cell(row["models"][name][kind])
                for row in rows
                for name in row["models"]
            }
            lines += [f"### {kind}, {dtype}", "", *crossed(cells), ""]
    return lines


def rounds_of(record: dict) -> str:
    """From the fewest to the most that a row took."""
    rounds = sorted({row["rounds"] for row in record["rows"]})
    return f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])


if __name__ == "__main__":
    main()
