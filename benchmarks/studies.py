"""The papers' studies of single choices, each a table: number of calibration windows (MoDeGPT Fig. 5), temperature of the
allocation (Table 25), sparsity up to 0.8 (Table 32), one module alone (Table 29), other shares of the modules (Table 31).

On opt-6m, whose rows take seconds: half of the text to calibrate on, half to evaluate on.

    python benchmarks/studies.py --model $RANKFOLD_MODELS/opt-6m
    python benchmarks/studies.py --model $RANKFOLD_MODELS/opt-6m --only epsilon
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import common
from perplexity_table import halves
from rankfold import CalibrationData, compress, make_method

SPARSITY = 0.3
DEFAULT, FORMS = "rankfold", "modegpt, the paper's module forms, our ridge"
METHODS = {
    DEFAULT: ("rankfold", {}),
    "modegpt": ("modegpt", {}),
    FORMS: ("modegpt", common.MODULE_FORMS | {"qk": "cr", "bias_refit": False}),
    "latentllm": ("latentllm", {}),
}
ALONE = {"mlp": ("up", "down"), "qk": ("q", "k"), "vo": ("v", "o")}  # and what latentllm calls that in OPT
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-likelihood per predicted token, on the second half of the text",
    "windows": "calibration windows the moments are measured on; Fig. 5",
    "epsilon": "temperature of the influence allocation (MoDeGPT Eq. 11); Table 25",
    "largest": "sparsity of the block that loses most",
    "share": "weights of the modules that are compressed over the linear weights of the blocks",
    "sparsity": "fraction of the linear weights of the blocks; Table 32",
    "alone": "one module is compressed, by a share of its own weights; Table 29",
    "slope": "of the least-squares line of perplexity over the per cent of its weights that a module lost, from 0 on, over the "
    "module's share: perplexity for each per cent of the blocks; the normalised slope of Table 29, the effective r of Table 7",
    "shares": "sparsities of single modules, all of which remove three tenths of the blocks; Table 31",
}


class Run(NamedTuple):
    """One compression of a study."""

    study: str
    setting: str  # row of the table
    value: str  # column
    method: str
    options: dict
    windows: int | None = None  # of the calibration; None: all


def sizes(there: int) -> Iterator[Run]:
    for name, (method, options) in METHODS.items():
        for windows in (*(n for n in (8, 16, 32, 64, 128) if n < there), None):
            value = f"all {there}" if windows is None else str(windows)
            yield Run("windows", name, value, method, options | {"sparsity": SPARSITY}, windows)


def temperatures(_: int) -> Iterator[Run]:
    for name in ("modegpt", FORMS):
        method, options = METHODS[name]
        for allocation in ("influence", "influence-modules"):
            for epsilon in (0.02, 0.05, 0.1, 0.2, 0.5, 2.0, None):
                chosen = options | {
                    "sparsity": SPARSITY,
                    "allocation": allocation + (f":temperature={epsilon}" if epsilon else ""),
                }
                yield Run(
                    "epsilon",
                    f"{name}, {allocation}",
                    "the paper's rule" if epsilon is None else str(epsilon),
                    method,
                    chosen,
                )


def sparsities(_: int) -> Iterator[Run]:
    for name, (method, options) in METHODS.items():
        for sparsity in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
            yield Run("sparsity", name, f"{sparsity:.0%}", method, options | {"sparsity": sparsity})


def alone(_: int) -> Iterator[Run]:
    for name, (method, options) in METHODS.items():
        for module, parts in ALONE.items():
            for sparsity in (0.1, 0.2, 0.3, 0.4, 0.5):
                own = dict.fromkeys(parts if name == "latentllm" else (module,), sparsity)
                yield Run("alone", f"{name}: {module}", f"{sparsity:.0%}", method, options | {"modules": own})


def shares(_: int) -> Iterator[Run]:
    """An MLP has as many weights as queries, keys, values and outputs twice: its sparsity counts double."""
    for name in ("modegpt", FORMS):
        method, options = METHODS[name]
        for attention in (0.0, 0.15, 0.3, 0.45, 0.6):
            mlp = (3 * SPARSITY - attention) / 2
            own = {"mlp": round(mlp, 4), "qk": attention, "vo": attention}
            yield Run("shares", name, f"mlp {mlp:.1%}, attention {attention:.0%}", method, options | {"modules": own})


STUDIES = {"windows": sizes, "epsilon": temperatures, "sparsity": sparsities, "alone": alone, "shares": shares}


def main() -> None:
    parser = common.arguments(__doc__, "studies_opt-6m")
    common.add_protocol(parser)
    parser.add_argument("--text", default="opt-6m-val.txt", help="in the data's text/ folder")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=[*STUDIES])
    parser.set_defaults(length=256)
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    tokens, windows, texts = halves(source, args)
    on = common.evaluation(source, windows, args)
    config = common.protocol(source, on, tokens, texts)
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record:
        common.add_perplexity(record, "dense", source.whole_model(), on, study=None)
    for run in (run for study in args.only for run in STUDIES[study](len(tokens.ids))):
        name = f"{run.study}: {run.setting}, {run.value}"
        if name not in record:
            measure(record, name, run, source, tokens, on)


def measure(record: common.Record, name: str, run: Run, source, tokens: CalibrationData, on) -> None:
    method = make_method(run.method, **run.options)
    some = replace(tokens, ids=tokens.ids[: run.windows])
    begin, plans = time.perf_counter(), []
    model = compress(source, method=method, calibration=some, on_plan=plans.append).model
    facts = {"study": run.study, "setting": run.setting, "value": run.value, "method": method.describe()}
    facts |= {"windows": len(some.ids), "compress_seconds": time.perf_counter() - begin, "largest": largest(plans[0])}
    facts |= {"share": sum(m.dense_weights for m in plans[0].modules) / plans[0].counted_weights}
    common.add_perplexity(record, name, model, on, **facts)


def largest(plan) -> float:
    """The sparsity of the block that loses most."""
    lost, there = {}, {}
    for module in plan.modules:
        lost[module.block] = lost.get(module.block, 0) + module.dense_weights - module.weights
        there[module.block] = there.get(module.block, 0) + module.dense_weights
    return max(lost[block] / there[block] for block in there)


if __name__ == "__main__":
    main()
