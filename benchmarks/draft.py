"""Compressed models as drafts of their own parent: speculative decoding, whose output stays the dense model's.

A draft writes DRAFTED tokens, the dense model checks them in one forward and takes those that it would have written. A
compressed model shares its parent's tokenizer by construction. Drafts by transformers' `assistant_model` are compared
with none, and with `prompt_lookup_num_tokens`, which copies from the prompt and costs nothing. Rounds run all of them
in turn.

    python benchmarks/draft.py
    python benchmarks/draft.py --model $RANKFOLD_MODELS/stories260K --prompts 2 --sparsities 0.5  # takes seconds
"""

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import common
import rankfold

DRAFTED, PROMPT = 4, 64
NONE, LOOKUP, BOTH = "none", "prompt lookup", "shortgpt, then rankfold"
CALIBRATION, TEXT = "text/wikitext2-valid.tokens", "text/wikitext2-test.tokens"
DEFINITIONS = {
    "draft": f"what proposes {DRAFTED} tokens for every forward of the dense model; a compressed model by method and "
    f"sparsity, all calibrated alike. `{BOTH}`: one after the other, "
    "each by the sparsity that leaves the same share of the rest",
    "accepted": "proposed tokens that the dense model takes, of all proposed",
    "tokens per forward": "tokens written over forwards of the dense model; 1 without a draft",
    "tokens/s": "of greedy writing, fp32, one prompt at a time; median over rounds, each over all prompts",
    "ratio": "over no draft, within a round: median, and quartiles over the rounds",
    "same": "prompts after which the same tokens are written as without a draft",
}


def main() -> None:
    args = parsed(arguments(__doc__, "draft", [0.5, 0.65, 0.8]))
    source = common.open_source(args.model)
    tokens = common.calibration(args, source, CALIBRATION)
    prompts, config = asked(args, source, tokens)
    record = common.Record(args.json, config, DEFINITIONS)
    dense = Counted(source.whole_model())
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        drafts = {name: Counted(model) for name, model in compressed(source, tokens, args.sparsities, Path(place))}
    for row in compare(dense, drafts, prompts, args.tokens, args.rounds):
        record.add(**row)
    common.say(f"wrote {common.shown(str(args.json))}")


def arguments(doc: str, name: str, sparsities: list[float]) -> argparse.ArgumentParser:
    """Return the options of a benchmark of drafts."""
    parser = common.arguments(doc, name)
    common.add_model(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--sparsities", type=float, nargs="+", default=sparsities)
    parser.add_argument("--prompts", type=int, default=8, help=f"of {PROMPT} tokens each")
    parser.add_argument("--tokens", type=int, default=48, help="written after every prompt")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds is at least 2: quartiles are reported")
    return args


def asked(args: argparse.Namespace, source, tokens) -> tuple[Tensor, dict]:
    """Return the prompts, ``(P, PROMPT)`` ids spread over the text, and what the numbers depend on."""
    prompts = common.windows(source, common.data_file(args.data, TEXT), PROMPT)
    prompts = prompts[:: len(prompts) // args.prompts][: args.prompts]
    return prompts, {
        "model": common.describe_model(source),
        "calibration": common.describe_tokens(tokens.ids, Path(CALIBRATION).name, tokens.seed),
        "prompts": common.describe_tokens(prompts, Path(TEXT).name),
        **{key: getattr(args, key) for key in ("tokens", "rounds", "sparsities")},
    }


def compressed(source, tokens, sparsities: list[float], place: Path):
    """Yield the name and the model of every draft."""

    def small(model, method: str, sparsity: float, folder: Path) -> Path:
        made = rankfold.make_method(method, sparsity=sparsity)
        rankfold.compress(model, method=made, calibration=tokens, output=folder)
        return folder

    for sparsity in sparsities:
        each = 1 - math.sqrt(1 - sparsity)
        halfway = small(source, "shortgpt", each, place / f"half-{sparsity}")
        rest = rankfold.open_model(str(halfway), dtype="float32", device="cpu")
        folders = {
            "rankfold": small(source, "rankfold", sparsity, place / f"rankfold-{sparsity}"),
            "shortgpt": small(source, "shortgpt", sparsity, place / f"shortgpt-{sparsity}"),
            BOTH: small(rest, "rankfold", each, place / f"both-{sparsity}"),
        }
        for method, folder in folders.items():
            common.say(f"{method} {sparsity}: compressed")
            yield f"{method} {sparsity}", rankfold.load(folder, dtype="float32", device="cpu")


class Counted:
    """A model, and how many forwards it has done."""

    def __init__(self, model: nn.Module):
        self.model, self.forwards = model, 0
        self.parameters = sum(p.numel() for p in model.parameters())
        model.register_forward_pre_hook(self._count)

    def _count(self, *_) -> None:
        self.forwards += 1


def compare(dense: Counted, drafts: dict[str, Counted], prompts: Tensor, count: int, rounds: int) -> list[dict]:
    """Return a row for each way of writing, no draft first."""
    ways = {NONE: {}, LOOKUP: {"prompt_lookup_num_tokens": DRAFTED}}
    for name, draft in drafts.items():
        settings = {"num_assistant_tokens": DRAFTED, "num_assistant_tokens_schedule": "constant"}
        draft.model.generation_config.update(**settings, assistant_confidence_threshold=0.0)
        ways[name] = {"assistant_model": draft.model}
    facts, seconds = {}, {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, how in ways.items():
            begin = time.perf_counter()
            facts[name] = written(dense, drafts.get(name), prompts, count, how)
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - begin)
        common.say(f"round {number} of {rounds}")
    return [row(name, facts, seconds, drafts.get(name, dense).parameters) for name in ways]


@torch.no_grad()
def written(dense: Counted, draft: Counted | None, prompts: Tensor, count: int, how: dict) -> dict:
    """Return the tokens after every prompt, and the forwards that they took."""
    counted = [dense, draft] if draft else [dense]
    before, found = [one.forwards for one in counted], []
    for ids in prompts[:, None]:
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        out = dense.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **how)
        found.append(out[0, ids.shape[1] :].tolist())
    forwards, *proposed = (one.forwards - start for one, start in zip(counted, before, strict=True))
    return {"tokens": found, "forwards": forwards, "proposed": sum(proposed)}


def row(name: str, facts: dict[str, dict], seconds: dict[str, list[float]], parameters: int) -> dict:
    """Return one row of the record; the parameters are those of the draft, or of the dense model without one."""
    mine, plain = facts[name], facts[NONE]["tokens"]
    count = sum(map(len, mine["tokens"]))
    # Every forward of the dense model writes one token of its own beside those that it takes.
    accepted = {"accepted": (count - mine["forwards"]) / mine["proposed"]} if mine["proposed"] else {}
    ratio, quartiles = common.compared(seconds[NONE], seconds[name])
    return {
        "name": name,
        "parameters": parameters,
        **accepted,
        "tokens per forward": count / mine["forwards"],
        "tokens/s": statistics.median(count / one for one in seconds[name]),
        "ratio": ratio,
        "ratio quartiles": quartiles,
        "same": sum(one == other for one, other in zip(mine["tokens"], plain, strict=True)),
        "prompts": len(plain),
    }


if __name__ == "__main__":
    main()
