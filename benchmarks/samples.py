"""What models write after the same prompts, greedily: the dense model and compressed ones beside each other, as in MoDeGPT's
Table 15.

SmolLM2-135M-Instruct, calibrated as for the tables of perplexity (32 x 1024 tokens of WikiText-2 validation, seed 0). Questions
go through the model's own chat template. A killed run goes on with the next model.

    python benchmarks/samples.py
    python benchmarks/samples.py --only dense rankfold
"""

import textwrap
import time

import common
from rankfold import compress, make_method
from rankfold.evaluation.generation import continue_text

SPARSITY = 0.3
TOKENS = 96
TEXT, C4 = "text/wikitext2-valid.tokens", "calibration/c4_demo.jsonl"
SETTINGS = {  # method, options, calibration text: a file in the data, or `self`
    "rankfold": ("rankfold", {}, TEXT),
    "rankfold, sparsity 0.1": ("rankfold", {"sparsity": 0.1}, TEXT),
    "rankfold, calibrated on C4": ("rankfold", {}, C4),
    "rankfold, calibrated on what the dense model writes": ("rankfold", {}, "self"),
    "rankfold, the same, sparsity 0.1": ("rankfold", {"sparsity": 0.1}, "self"),
    "modegpt": ("modegpt", {}, TEXT),
    common.MODULE_FORMS_NAME: ("modegpt", common.MODULE_FORMS, TEXT),
    "latentllm (joint)": ("latentllm", {}, TEXT),
    "slicegpt": ("slicegpt", {}, TEXT),
    "shortgpt": ("shortgpt", {}, TEXT),
}
PROMPTS = (  # continued as they are; the first one is the paper's
    "The universe is the entirety of space, time, matter, and energy that exists.",
    "The city of Paris is the capital of",
)
QUESTIONS = (  # to the chat template
    "Why is the sky blue?",
    "Write three sentences about a dog who lives on a farm.",
)
DEFINITIONS = {
    "texts": f"greedy, at most {TOKENS} tokens, in the precision the model is opened in; what comes behind the prompt, without "
    "special tokens",
    "sparsity": "asked for: fraction of the linear weights of the blocks",
}
WIDTH = 110  # of the page's lines


def main() -> None:
    parser = common.arguments(__doc__, "samples_smollm2")
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=("dense", *SETTINGS), help="default: all")
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    path = common.data_file(args.data, TEXT)
    tokens = common.calibration(source, path, args)
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "calibration": common.describe_tokens(tokens.ids, path, tokens.seed),
        "sparsity": SPARSITY,
        "prompts": PROMPTS,
        "questions": QUESTIONS if source.tokenizer.chat_template else (),
    }
    config = {
        key: list(value) if isinstance(value, tuple) else value for key, value in config.items()
    }  # as JSON has it
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for name in args.only or ("dense", *SETTINGS):
        if name not in record:
            model, facts = model_of(name, source, args)
            texts = [
                continue_text(model, source.tokenizer, prompt, max_new_tokens=TOKENS)
                for prompt in prompts(source, config)
            ]
            record.add(name, **facts, texts=texts)
            common.say(f"{name}: {texts[0][:60]!r}")
    common.say(f"wrote {common.shown(str(args.json))}")


def model_of(name: str, source, args):
    """A model in memory, and what it is."""
    if name == "dense":
        return source.whole_model(), {}
    kind, options, text = SETTINGS[name]
    path = text if text == "self" else common.data_file(args.data, text)
    tokens = common.calibration(source, path, args)
    method, begin = make_method(kind, **{"sparsity": SPARSITY} | options), time.perf_counter()
    model = compress(source, method=method, calibration=tokens).model
    facts = {"method": method.describe(), "calibration": common.describe_tokens(tokens.ids, path, tokens.seed)}
    return model, facts | {"compress_seconds": time.perf_counter() - begin}


def prompts(source, config: dict) -> list[str]:
    """Every prompt as the model reads it."""
    asked = [
        source.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in config["questions"]
    ]
    return [*config["prompts"], *asked]


def table(record: dict) -> list[str]:
    """Prompt by prompt what every model writes."""
    config = record["config"]
    text = config["calibration"]
    lines = [
        f"Sparsity {config['sparsity']} and {text['samples']} x {text['length']} tokens of `{text['source']}` where a name "
        "gives nothing else.",
        "",
    ]
    titles = [*(f"Continue: {prompt}" for prompt in config["prompts"]), *(f"Asked: {q}" for q in config["questions"])]
    for index, title in enumerate(titles):
        lines += [f"### {title}", ""]
        for row in record["rows"]:
            lines += [f"{row['name']}:", "", "~~~text", *wrapped(row["texts"][index]), "~~~", ""]
    return lines


def wrapped(text: str) -> list[str]:
    """Lines of the page; its own lines stay, and none of them can end the block."""
    lines = text.strip().replace("~~~", "~ ~ ~").splitlines()
    return [part for line in lines for part in textwrap.wrap(line, WIDTH) or [""]] or ["(nothing)"]


if __name__ == "__main__":
    main()
