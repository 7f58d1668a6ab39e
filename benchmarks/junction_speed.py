"""How fast latents are: prefill and decode of LatentLLM in three junctions, beside the dense model.

Default options, one sparsity, all models in turning order, in as many rounds as it takes (see settled_speed.py). Speed depends
on shapes, not on values, so the models are calibrated on little text. Run it on a machine that does nothing else.

    python benchmarks/junction_speed.py                   # SmolLM2-135M, sparsity 0.3, about 8 minutes of two cores
    python benchmarks/junction_speed.py --batch 1         # one token at a time
"""

import tempfile
from pathlib import Path

import common
import settled_speed
from module_speed import rounds_of
from rankfold import load, make_method
from settled_speed import KINDS, cell
from speed import make
from studies_table import table as crossed

JUNCTIONS = {"block identity (default)": "block_identity_right", "symmetric": "symmetric", "lu": "lu"}
DEFINITIONS = {"sparsity": "fraction of the linear weights of the blocks"} | settled_speed.DEFINITIONS


def main() -> None:
    parser = common.arguments(__doc__, "junction_speed_smollm2")
    common.add_model(parser)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    settled_speed.add_arguments(parser)
    args = parser.parse_args()
    source = common.open_source(args.model)
    options = settled_speed.options_of(args)
    shapes = {name: options.pop(name) for name in ("batch", "prompt", "steps")}
    config = {
        "model": common.describe_model(source),
        "method": "latentllm",
        "sparsity": args.sparsity,
        "speed": options,
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    wanted = [dtype for dtype in args.dtypes if name_of(dtype, shapes) not in record]
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        for dtype in wanted:
            models = {"dense": load(common.model_path(args.model), dtype=dtype)}
            for name, junction in JUNCTIONS.items():
                place = Path(folder) / junction
                if not place.exists():
                    make(source, make_method("latentllm", sparsity=args.sparsity, junction=junction), place)
                models[name] = load(place, dtype=dtype)
            found = settled_speed.measure(models, **shapes, **options)
            record.add(name_of(dtype, shapes), dtype=dtype, **shapes, **found)
            for kind in KINDS:
                common.say(f"{kind}: " + ", ".join(f"{name} {cell(found['models'][name][kind])}" for name in JUNCTIONS))
    common.say(f"wrote {common.shown(str(args.json))}")


def name_of(dtype: str, shapes: dict) -> str:
    return f"{dtype} {shapes['batch']} x {shapes['prompt']} + {shapes['steps']}"


def table(record: dict) -> list[str]:
    """For every precision and batch: models by prefill and decode."""
    config = record["config"]
    lines = [
        f"`latentllm`, sparsity {config['sparsity']}; {rounds_of(record)} rounds. Tokens per second, over the dense "
        "model's, and the quartiles of that.",
        "",
    ]
    for row in record["rows"]:
        shape = f"{row['batch']} x {row['prompt']} tokens of prefill, {row['batch']} x {row['steps']} of decode"
        cells = {(name, kind): cell(found[kind]) for name, found in row["models"].items() for kind in KINDS}
        lines += [f"### {row['dtype']}, {shape}", "", *crossed(cells), ""]
    return lines


if __name__ == "__main__":
    main()
