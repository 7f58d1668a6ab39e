"""Perplexity of named settings, one after another; a killed run keeps its rows and goes on where it was.

SmolLM2-135M: calibration 32 x 1024 tokens of WikiText-2 validation (seed 0), evaluation on every 9th window of 1024 tokens of
WikiText-2 test, the first 32 of these; each split is one string. OPT: one text, of which the first half of the windows
calibrates and the second half evaluates. Logits in bf16 autocast where the processor has it.

    python benchmarks/perplexity_table.py
    python benchmarks/perplexity_table.py --model $RANKFOLD_MODELS/qwen2.5-coder-0.5b.gguf --samples 24 --first 10 \\
        --evaluate-in float32 --sparsity 0.3 --json benchmarks/results/perplexity_qwen2.5.json
    python benchmarks/perplexity_table.py --model $RANKFOLD_MODELS/opt-6m --text opt-6m-val.txt --length 256 \\
        --json benchmarks/results/perplexity_opt-6m.json
    python benchmarks/perplexity_table.py --model $RANKFOLD_MODELS/gemma-3-270m-q4_k_m.gguf --length 512 --first 16 \\
        --sparsity 0.3 --json benchmarks/results/perplexity_gemma3.json
"""

import time
from dataclasses import dataclass, field

import common
from rankfold import CalibrationData, compress, make_method
from rankfold.evaluation.perplexity import DEFINITION

DEFINITIONS = {
    "perplexity": f"{DEFINITION}; with form `plain` the file is one string instead of rows",
    "nll": "nats per predicted token",
    "sparsity": "asked for: fraction of the linear weights of the blocks, or of one module's where options say so",
    "removed": "reached: weights removed over linear weights of the blocks",
    "parameters": "of the compressed model, biases included, a tied matrix once; codes of quantised factors not",
    "bytes": "of its weights on disk: codes, scales and indices included",
    "held_out_ratio": "perplexity after over before, on calibration windows that the run kept out of the fit",
    "damaged": "the run itself warned: the ratio is more than (1 - sparsity)^-3; shown as (!)",
    "compress_seconds": "from an open model to the compressed model in memory, calibration included",
}


@dataclass(frozen=True)
class Setting:
    """One line of a table at one or more sparsities."""

    name: str
    sparsities: tuple[float, ...]
    method: str = "modegpt"
    options: dict = field(default_factory=dict)
    mode: str = "sequential"
    modules: tuple[str, ...] = ()  # compress these only, each by the sparsity of its own weights


ALL = (0.1, 0.2, 0.3, 0.4, 0.5)
# The default without each of its steps, or with one that is off.
ABLATIONS = {
    f"rankfold {key}={str(value).lower()}": {key: value}
    for key, value in (
        ("allocation", "uniform"),
        ("residual_correction", False),
        ("output_weighting", "fisher"),
        ("allow_module_removal", True),
    )
}
DEFAULT = (
    Setting("rankfold", (0.3, *ALL, 0.6), "rankfold"),
    *(Setting(name, (0.2, 0.3, 0.5), "rankfold", options) for name, options in ABLATIONS.items()),
)
LLAMA = (
    *DEFAULT,
    Setting("modegpt", (0.3,)),
    Setting(common.MODULE_FORMS_NAME, (0.3,), options=common.MODULE_FORMS),
    Setting(common.PUBLISHED_NAME, (0.3,), options=common.PUBLISHED),
    Setting("modegpt select=leverage", (0.3,), options={"selection": "leverage"}),
    Setting("modegpt select_qk=norm", (0.3,), options={"selection_qk": "norm"}),
    Setting("modegpt gqa=paper", (0.3,), options={"gqa": "paper"}),
    Setting("modegpt multiple=2", (0.3,), options={"rank_multiple": 2}),
    Setting("modegpt one-pass", (0.3,), mode="one-pass"),
    Setting("modegpt influence", (0.3,), options={"allocation": "influence"}),
    # What form suits which module: units or dimensions that go, or latents in between.
    Setting("mlp only", (0.3, 0.5), modules=("mlp",)),
    Setting("qk only", (0.3, 0.5), modules=("qk",)),
    Setting("vo only", (0.3, 0.5), modules=("vo",)),
    Setting("latentllm: mlp only", (0.3, 0.5), "latentllm", modules=("gate", "up", "down")),
    Setting("latentllm: qk only", (0.3, 0.5), "latentllm", modules=("q", "k")),
    Setting("latentllm: vo only", (0.3, 0.5), "latentllm", modules=("v", "o")),
    Setting("rootcov + block identity", (0.3,), method="rootcov"),
    Setting("latentllm (joint)", (0.3,), method="latentllm"),
    Setting("latentllm (joint, window=0)", (0.3,), method="latentllm", options={"window": 0}),
    Setting("svd-llm (root covariance, plain factors)", (0.3,), method="svd-llm"),
    Setting("modegpt", (0.1, 0.2, 0.4, 0.5, 0.6)),
    Setting(common.MODULE_FORMS_NAME, (0.1, 0.2, 0.4, 0.5, 0.6), options=common.MODULE_FORMS),
    Setting(common.PUBLISHED_NAME, (0.1, 0.2, 0.4, 0.5), options=common.PUBLISHED),
    Setting("latentllm (joint)", (0.1, 0.2, 0.4, 0.5, 0.6), method="latentllm"),
)
NORMED = (Setting("rankfold modules=mlp,qk,vo", (0.3,), "rankfold", {"modules": ("mlp", "qk", "vo")}),)
NORM_BEHIND = (Setting("rankfold norm_aware=false", (0.2, 0.3, 0.5), "rankfold", {"norm_aware": False}),)
OPT = (
    *DEFAULT,
    Setting("modegpt", ALL),
    Setting("modegpt select=leverage", ALL, options={"selection": "leverage"}),
    Setting("modegpt qk=cr", ALL, options={"qk": "cr"}),
    Setting("modegpt bias_refit=false", ALL, options={"bias_refit": False}),
    Setting(common.MODULE_FORMS_NAME, ALL, options=common.MODULE_FORMS | {"qk": "cr", "bias_refit": False}),
    Setting(common.PUBLISHED_NAME, ALL, options=common.PUBLISHED),
    Setting("rootcov + block identity", ALL, method="rootcov"),
    Setting("latentllm sparse=0.3", (0.3, 0.5), "latentllm", {"sparse": 0.3}),
    # At 54 and 67 % with the indices of the values as many bytes as rootcov at 30 and 50 %.
    Setting("latentllm sparse=1", (0.3, 0.5, 0.54, 0.67), "latentllm", {"sparse": 1.0}),
    *(
        Setting(" ".join(["latentllm", *(f"{k}={v}".lower() for k, v in form.items())]), (0.3,), "latentllm", form)
        for form in (
            {},
            {"qk_ranks": "spectra"},
            {"head_junction": True},
            {"joint": "vo", "attention_aware": True},
            {"shared_qkv": True},
            {"split_head": True, "junction": "block_identity_left"},
            {"sparse": 0.1},
            {"bits": 8},
            {"bits": 4},
            {"sparse": 0.1, "bits": 8},
        )
    ),
)


def main() -> None:
    parser = common.arguments(__doc__, "perplexity_smollm2")
    common.add_protocol(parser)
    parser.add_argument("--text", help="one text in the data's text/ folder, half for each; default: WikiText-2")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="settings, or `dense`; default: all")
    parser.add_argument("--sparsity", type=float, nargs="+", help="only these; default: all")
    args = parser.parse_args()

    source = common.open_source(args.model, autocast=args.autocast)
    tokens, windows, texts = halves(source, args) if args.text else wikitext2(source, args)
    on = common.evaluation(source, windows, args)
    config = common.protocol(source, on, tokens, texts) | {"form": "plain" if args.text else args.form}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record and (not args.only or "dense" in args.only):
        add(record, "dense", source.whole_model(), on, sparsity=0.0)
    settings = OPT if source.config.model_type == "opt" else LLAMA
    settings += NORMED if source.architecture.attention.qk_norm else ()
    settings += NORM_BEHIND if source.architecture.norms_behind else ()
    for setting in settings:
        for sparsity in setting.sparsities:
            name = f"{setting.name} {sparsity}"
            chosen = not args.only or setting.name in args.only
            if name not in record and chosen and (not args.sparsity or sparsity in args.sparsity):
                run(record, name, setting, sparsity, source, tokens, on)
    common.say(f"wrote {common.shown(str(args.json))}")


def wikitext2(source, args):
    valid = common.data_file(args.data, "text/wikitext2-valid.tokens")
    windows, test = common.wikitext2_windows(source, args)
    return common.calibration(source, valid, args, args.form), windows, [valid, test]


def halves(source, args):
    """First half of the windows to calibrate on, second half to evaluate on: no window, and no token, is in both."""
    path = common.data_file(args.data, f"text/{args.text}")
    windows = common.windows(source, path, args.length)
    half = len(windows) // 2
    fit = half - max(1, min(8, half // 9))  # as many are kept out of the fit as `load_calibration` would keep
    tokens = CalibrationData(
        windows[:fit].contiguous(),
        path.name,
        f"{path.name}, first half",
        args.seed,
        held_out=windows[fit:half].contiguous(),
    )
    return tokens, windows[half:], [f"{path}, first half", f"{path}, second half"]


def run(record, name: str, setting: Setting, sparsity: float, source, tokens: CalibrationData, on) -> None:
    own = {"modules": dict.fromkeys(setting.modules, sparsity)} if setting.modules else {"sparsity": sparsity}
    method = make_method(setting.method, **setting.options, **own)
    begin = time.perf_counter()
    model = compress(source, method=method, calibration=tokens, mode=setting.mode).model
    seconds = time.perf_counter() - begin
    facts = {"setting": setting.name, "method": method.describe(), "mode": setting.mode, "compress_seconds": seconds}
    described = model.config.quantization_config.fields
    facts |= {"removed": described["counts"]["sparsity"], "bytes": described["counts"]["bytes"]}
    outcome = described["held_out"]
    facts |= {"held_out_ratio": outcome["ratio"], "damaged": outcome["warning"] is not None} if outcome else {}
    add(record, name, model, on, sparsity=sparsity, **facts)


def add(record, name: str, model, on, **facts) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    common.add_perplexity(record, name, model, on, parameters=parameters, **facts)


if __name__ == "__main__":
    main()
