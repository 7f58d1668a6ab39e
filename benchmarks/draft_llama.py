"""Compressed and quantised models as drafts of their own parent in llama.cpp: `llama-speculative-simple`.

Drafts are in Q4_0, the dense model in F16: where memory bounds decoding, a draft of a quarter of the bytes is cheapest.
The dense model in Q4_0 is one of them: a draft needs no compression.

    python benchmarks/draft_llama.py
    python benchmarks/draft_llama.py --model $RANKFOLD_MODELS/stories260K --prompts 2 --sparsities 0.5  # takes seconds
"""

import os
import statistics
import tempfile
from pathlib import Path

import common
import llama_tools
from draft import DRAFTED, NONE, PROMPT, arguments, asked, parsed
from same_bytes import Files, model_name

FORMAT = "Q4_0"
DEFINITIONS = {
    "draft": f"what proposes up to {DRAFTED} tokens for every forward of the dense model, fewer where it is unsure; in "
    f"{FORMAT}; compressed by the default method with `--target llama.cpp` at a sparsity",
    "accepted": "proposed tokens that the dense model takes, of all proposed",
    "tokens per forward": "tokens written over forwards of the dense model; 1 without a draft",
    "tokens/s": "of greedy writing in llama.cpp, one prompt at a time; median over rounds, each over all prompts; "
    "without a draft: llama-bench after as many tokens",
    "ratio": "over no draft, within a round: median, and quartiles over the rounds",
}


def main() -> None:
    parser = arguments(__doc__, "draft_llama", [0.3, 0.5, 0.7])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the models; default: a temporary one")
    args = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        files = Files(args, args.work or Path(place))
        prompts, config = asked(args, files.source, files.tokens)
        config |= {"llama_cpp": llama_tools.VERSION, "threads": args.threads}
        record = common.Record(args.json, config, DEFINITIONS)
        for row in compare(files, [files.source.tokenizer.decode(ids) for ids in prompts], args):
            record.add(**row)
    common.say(f"wrote {common.shown(str(args.json))}")


def compare(files: Files, prompts: list[str], args) -> list[dict]:
    """Return a row for each draft, none first."""
    dense = files.exact(0.0)
    names = {f"{model_name(sparsity)} {FORMAT}": sparsity for sparsity in (0.0, *args.sparsities)}
    drafts = {name: files.quantised(sparsity, FORMAT)[0] for name, sparsity in names.items()}
    rounds: dict[str, list[float]] = {name: [] for name in (NONE, *drafts)}
    counts: dict[str, dict] = {}
    for number in range(args.rounds):
        common.say(f"round {number + 1} of {args.rounds}")
        rounds[NONE].append(llama_tools.decode_speed(dense, PROMPT, args.tokens, args.threads))
        for name, file in drafts.items():
            found = [llama_tools.drafted(dense, file, text, args.tokens, DRAFTED, args.threads) for text in prompts]
            counts[name] = {key: sum(one[key] for one in found) for key in found[0]}
            rounds[name].append(counts[name]["written"] / counts[name]["seconds"])
    return [row(name, rounds, counts.get(name), (drafts | {NONE: dense})[name]) for name in rounds]


def row(name: str, rounds: dict[str, list[float]], counts: dict | None, file: Path) -> dict:
    """Return one row of the record; the bytes are those of the draft, or of the dense model without one."""
    ratio, quartiles = common.compared(rounds[name], rounds[NONE])
    facts = {"tokens per forward": 1.0}
    if counts:
        forwards = counts["written"] - counts["accepted"]
        facts = {
            "accepted": counts["accepted"] / counts["proposed"],
            "tokens per forward": counts["written"] / forwards,
        }
    speed = {"tokens/s": statistics.median(rounds[name]), "ratio": ratio, "ratio quartiles": quartiles}
    return {"name": name, "bytes": file.stat().st_size, **facts, **speed}


if __name__ == "__main__":
    main()
