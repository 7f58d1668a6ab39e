"""What `--for` costs: perplexity with the ranks that an engine or a format takes without padding, and the parameters there.

Texts, windows and precision as in perplexity_table.py. Each result is exported too: what padding gives back of other ranks is
in the columns `stock` and `deci`.

    python benchmarks/targets.py
    python benchmarks/targets.py --only "rankfold for vllm" --sparsity 0.3
    python benchmarks/targets.py --model $RANKFOLD_MODELS/opt-6m --text opt-6m-val.txt --length 256 \\
        --json benchmarks/results/targets_opt-6m.json
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import common
import perplexity_table
from rankfold import compress, make_method, plan, save
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.exports import export

SPARSITIES = (0.2, 0.3)
FORMS = ("stock", "deci")
DEFINITIONS = {
    name: perplexity_table.DEFINITIONS[name] for name in ("perplexity", "nll", "sparsity", "removed", "parameters")
}
DEFINITIONS |= {
    "stock, deci": "parameters of the result exported in that form; none where the form cannot have it, or is as large as the "
    "dense model; deci is for Llamas",
    "refused": "why these ranks do not exist: the line that the command says",
}


@dataclass(frozen=True)
class Setting:
    """One row at every sparsity."""

    method: str
    target: str
    options: tuple[tuple[str, object], ...] = ()
    apart: bool = False  # the widths of these options, and every key head chooses its own rotary pairs

    @property
    def name(self) -> str:
        options = (f"{name}={value}" for name, value in self.options)
        own = ["as wide, own pairs,"] if self.apart else []
        return " ".join([self.method, *options, *own, "for", self.target])

    def make(self, sparsity: float, source):
        """The method."""
        method = make_method(self.method, target=self.target, sparsity=sparsity, **dict(self.options))
        if not self.apart:
            return method
        dense, kept = {}, {}
        for module in plan(source, method=method).modules:
            dense[module.module] = dense.get(module.module, 0) + module.dense_weights
            kept[module.module] = kept.get(module.module, 0) + module.weights
        return replace(method, head_dim=0, modules={name: 1 - kept[name] / dense[name] for name in dense})


UNIFORM = (("allocation", "uniform"),)
HEADS = (("head_dim", 56),)  # of 64 in SmolLM2, the same pairs in the whole model
NARROW = (("head_dim", 48),)
SETTINGS = (
    *(Setting("rankfold", target) for target in ("transformers", "vllm", "llama.cpp")),
    *(Setting("rankfold", target, UNIFORM) for target in ("transformers", "stock")),
    Setting("rankfold", "llama.cpp", HEADS),
    Setting("rankfold", "stock", (*UNIFORM, *HEADS)),
    *(Setting("modegpt", "transformers", heads, apart) for heads in (HEADS, NARROW) for apart in (False, True)),
    *(Setting("modegpt", target) for target in ("transformers", "vllm", "llama.cpp", "stock")),
    *(Setting("latentllm", target) for target in ("transformers", "vllm")),
)


def main() -> None:
    parser = common.arguments(__doc__, "targets_smollm2")
    common.add_protocol(parser)
    parser.add_argument("--text", help="one text in the data's text/ folder, half for each; default: WikiText-2")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[setting.name for setting in SETTINGS])
    parser.add_argument("--sparsity", type=float, nargs="+", default=SPARSITIES)
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    split = perplexity_table.halves if args.text else perplexity_table.wikitext2
    tokens, windows, texts = split(source, args)
    on = common.evaluation(source, windows, args)
    config = common.protocol(source, on, tokens, texts)
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record:
        perplexity_table.add(record, "dense", source.whole_model(), on, sparsity=0.0)
    for setting in SETTINGS:
        for sparsity in args.sparsity if not args.only or setting.name in args.only else ():
            if f"{setting.name} {sparsity}" not in record:
                run(record, setting, sparsity, source, tokens, on)
    common.say(f"wrote {common.shown(str(args.json))}")


def run(record, setting: Setting, sparsity: float, source, tokens, on) -> None:
    name, facts = f"{setting.name} {sparsity}", {"setting": setting.name, "sparsity": sparsity}
    try:
        method = setting.make(sparsity, source)
        model = compress(source, method=method, calibration=tokens).model
    except OptionError as error:
        record.add(name, **facts, method=None, refused=str(error))
        common.say(f"{name}: {error}")
        return
    counts = model.config.quantization_config.fields["counts"]
    facts |= {"method": method.describe(), "removed": counts["sparsity"]} | exported(model)
    perplexity_table.add(record, name, model, on, **facts)


def exported(model) -> dict:
    """Parameters of the model in other forms."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        save(model, Path(place, "small"))
        for form in FORMS:
            try:
                found[form] = export(Path(place, "small"), Path(place, form), form).exported
            except UnsupportedModelError:
                found[form] = None
    return found


def table(record: dict) -> list[str]:
    """Rows of docs/results/targets.md."""
    from render import grid, score

    rows, head = record["rows"], ["", "sparsity", "removed", "perplexity", "parameters", *FORMS]

    def line(row: dict) -> list[str]:
        if "refused" in row:
            return [row["setting"], f"{row['sparsity']:.0%}", "", "does not exist", "", "", ""]
        counts = [row.get("parameters"), *(row.get(form) for form in FORMS)]
        removed = f"{row['removed']:.2%}" if "removed" in row else ""
        shown = ["" if count is None else f"{count / 1e6:.2f} M" for count in counts]
        return [row.get("setting", "dense"), f"{row['sparsity']:.0%}", removed, score(row), *shown]

    return grid(head, [line(row) for row in sorted(rows, key=lambda row: row["sparsity"])])


if __name__ == "__main__":
    main()
