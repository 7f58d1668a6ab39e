"""Does a model still write? Greedy generation: exact answers, repetition, and where it leaves the dense model's text.

Choosing among given answers hides what compression does to writing (arXiv:2602.01997), so nothing is chosen from here.

Shape legend: B prompts of one length, T tokens of each, N tokens written.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._utils.progress import track
from ..architectures import context_of
from ..data.probes import passages_of
from ..data.text import decode
from ..data.tokens import tokenised
from ..errors import DataError, OptionError, option
from .generation import ends_alone, generate_ids
from .local_tasks import files_of, local_rows

WRITTEN, BEGINNING = 64, 32  # tokens of free text, and of the passage it goes on from
LAST_WORD = "last word"  # the kind of prompt whose rows are in a folder
ORDERS = {"repetition": 4, "distinct": 2}  # tokens of what is counted
SEED = 0
WORDS = (
    *("stone", "river", "lamp", "cloud", "horse", "bread", "glass", "winter"),
    *("garden", "paper", "silver", "window", "forest", "bottle", "candle", "yellow"),
)
DEFINITIONS = {
    "exact": "share of prompts whose greedy continuation is the answer: its first word (last word), line (copying) or "
    "number (arithmetic)",
    "repetition": "1 - distinct 4-grams / 4-grams of a text, mean over texts",
    "distinct": "distinct 2-grams / 2-grams of all texts together",
    "equal": "share of positions with the token that the dense model writes there",
    "first_difference": "tokens written before the first that differs from the dense model's, mean over texts",
}


class Prompt(NamedTuple):
    """A text to continue, and the answer."""

    text: str
    answer: str
    read: Callable[[str], str]  # of the continuation, what is compared with the answer


def repetition(tokens: Sequence[int], order: int = ORDERS["repetition"]) -> float | None:
    """Return ``1 - distinct n-grams / n-grams`` of one text, in [0, 1) (rep-n of arXiv:1908.04319); ``None`` where it
    has none."""
    share = distinct([tokens], order)
    return None if share is None else 1 - share


def distinct(texts: Iterable[Sequence[int]], order: int = ORDERS["distinct"]) -> float | None:
    """Return ``distinct n-grams / n-grams`` of all texts together, in (0, 1] (distinct-n of arXiv:1510.03055); ``None``
    where there are none."""
    found = [tuple(text[i : i + order]) for text in texts for i in range(len(text) - order + 1)]
    return len(set(found)) / len(found) if found else None


def first_difference(own: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens before the first that differs; all of the shorter text where none does."""
    pairs = zip(own, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))


def equal_share(own: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of positions with the same token, of the longer text; 1 where both are empty."""
    longest = max(len(own), len(other))
    return sum(a == b for a, b in zip(own, other, strict=False)) / longest if longest else 1.0


def leading_word(text: str) -> str:
    """Return the first word of a text, without signs around it."""
    found = re.search(r"\w+(?:['\u2019-]\w+)*", text)
    return found[0] if found else ""


def leading_line(text: str) -> str:
    """Return the first line that is not empty, without blanks around it."""
    return text.strip().partition("\n")[0].strip()


def leading_number(text: str) -> str:
    """Return the first whole number of a text."""
    found = re.search(r"-?\d+", text)
    return found[0] if found else ""


def copying(count: int) -> list[Prompt]:
    """Make prompts that ask for four words again, after three examples."""
    draw = random.Random(SEED)
    lines = [" ".join(draw.sample(WORDS, 4)) for _ in range(3 + count)]
    head = "".join(f"Text: {line}\nCopy: {line}\n\n" for line in lines[:3])
    return [Prompt(f"{head}Text: {line}\nCopy:", line, leading_line) for line in lines[3:]]


def arithmetic(count: int) -> list[Prompt]:
    """Make prompts that ask for a sum or a difference of two numbers below 50, after four examples."""
    draw = random.Random(SEED)

    def problem() -> tuple[str, str]:
        a, b = sorted((draw.randrange(2, 50), draw.randrange(2, 50)), reverse=True)
        sign = draw.choice("+-")
        return f"{a} {sign} {b} =", str(a + b if sign == "+" else a - b)

    head = "".join(f"{asked} {answer}\n" for asked, answer in (problem() for _ in range(4)))
    return [Prompt(f"{head}{asked}", answer, leading_number) for asked, answer in (problem() for _ in range(count))]


def last_words(file: Path, count: int) -> list[Prompt]:
    """Read prompts from rows of LAMBADA: all of a passage but its last word."""
    rows = [json.loads(line) for line in decode(file.read_bytes(), file).split("\n") if line.strip()][:count]
    pairs = [row["text"].strip().rpartition(" ") for row in rows]
    return [Prompt(before, leading_word(word), leading_word) for before, _, word in pairs]


@dataclass(frozen=True)
class Writing:
    """What to have a model write.

    Args:
        folder: holds the rows of LAMBADA, as for tasks; without it last words are left out.
        limit: prompts of each kind, ``>= 1``.
        batch_size: prompts of one length in one forward, ``>= 1``; results agree up to rounding.
        baseline: a dense model whose texts are compared with, name as for :func:`~rankfold.load`.
    """

    folder: str | None = None
    limit: int = 32
    batch_size: int = 16
    baseline: str | None = None

    def prompts(self) -> dict[str, list[Prompt]]:
        """Return the prompts of every kind.

        Raises:
            OptionError, DataError: a number out of range; no folder, or rows of LAMBADA of another kind.
        """
        for name in ("limit", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{option(name)} must be >= 1, got {getattr(self, name)}")
        found = {"copying": copying(self.limit), "arithmetic": arithmetic(self.limit)}
        folder = None if self.folder is None else Path(self.folder).expanduser()
        if folder is None or not files_of("lambada_openai", folder):
            return found
        rows = local_rows("lambada_openai", folder, None)["test"]
        return {LAST_WORD: last_words(rows, self.limit)} | found

    def measure(self, network, tokenizer, dense: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
        """Have a model in memory write, greedily.

        Args:
            network: a causal language model.
            tokenizer: the model's.
            dense: tokens that the dense model writes, of :meth:`free_text`.

        Returns:
            ``exact``: kind -> ``{"share", "stderr", "prompts"}``; ``repetition``, ``distinct``; with ``dense``
            ``equal`` and ``first_difference``; ``texts``, ``written`` tokens of each at most, and ``definitions`` of
            all.

        Raises:
            OptionError, DataError: see :meth:`prompts`.
            CheckpointError: the model's generation settings are damaged.
            NumericsError: the model predicts NaN.
        """
        exact = {kind: self._exact(network, tokenizer, prompts, kind) for kind, prompts in self.prompts().items()}
        return {"exact": exact, **compared(self.free_text(network, tokenizer), dense)}

    def free_text(self, network, tokenizer) -> list[list[int]]:
        """Return the tokens that a model writes after the beginning of each probe text of prose and of the web."""
        passages = [passage for kind in ("prose", "web text") for passage in passages_of(kind)]
        context = _context(network)
        beginning = min(BEGINNING, context // 2)
        ids = [self._encoded(network, tokenizer, passage)[:beginning] for passage in passages[: self.limit]]
        return written(network, tokenizer, ids, min(WRITTEN, context - beginning), self.batch_size, "writing")

    def _exact(self, network, tokenizer, prompts: list[Prompt], kind: str) -> dict[str, Any]:
        ids = [self._encoded(network, tokenizer, prompt.text) for prompt in prompts]
        steps = 2 + max(len(self._encoded(network, tokenizer, f" {prompt.answer}")) for prompt in prompts)
        room = _context(network) - steps
        if room < 1:
            raise DataError(f"the model's context of {_context(network)} tokens has no room for an answer of {steps}")
        found = written(network, tokenizer, [row[-room:] for row in ids], steps, self.batch_size, kind)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
        right = [prompt.read(text) == prompt.answer for prompt, text in zip(prompts, texts, strict=True)]
        share, count = sum(right) / len(right), len(right)
        error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
        return {"share": share, "stderr": error, "prompts": count}

    def _encoded(self, network, tokenizer, text: str) -> list[int]:
        return tokenised(tokenizer, text, type(network).__name__, network.config.get_text_config().vocab_size).tolist()


def compared(texts: list[list[int]], dense: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Return what is said of free texts, beside those of the dense model where there are some."""
    repeated = [share for share in map(repetition, texts) if share is not None]
    facts: dict[str, Any] = {
        "repetition": sum(repeated) / len(repeated) if repeated else None,
        "distinct": distinct(texts),
    }
    if dense is not None:
        pairs = list(zip(texts, dense, strict=True))
        facts["equal"] = sum(equal_share(own, other) for own, other in pairs) / len(pairs)
        facts["first_difference"] = sum(first_difference(own, other) for own, other in pairs) / len(pairs)
    definitions = {name: DEFINITIONS[name] for name in ("exact", *facts)}
    return facts | {"texts": len(texts), "written": max(map(len, texts)), "definitions": definitions}


def written(network, tokenizer, prompts: list[list[int]], steps: int, batch_size: int, kind: str) -> list[list[int]]:
    """Return at most ``steps`` tokens after each prompt, those before an end of text; prompts of one length go
    together, so that nothing is padded."""
    lengths: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(index)
    batches = [group[i : i + batch_size] for group in lengths.values() for i in range(0, len(group), batch_size)]
    found: dict[int, list[int]] = {}
    for batch in track(batches, f"generating: {kind}"):
        ids = torch.tensor([prompts[index] for index in batch])
        with ends_alone(network):
            out = generate_ids(network, tokenizer, ids, max_new_tokens=steps)
        for index, row in zip(batch, out.tolist(), strict=True):
            found[index] = _before_end(row, network.generation_config.eos_token_id)
    return [found[index] for index in range(len(prompts))]


def _before_end(tokens: list[int], end: int | list[int] | None) -> list[int]:
    ends = {end} if isinstance(end, int) else {*(end or ())}
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def _context(network) -> int:
    """Return the positions a model has; of one without a limit enough for any probe."""
    return context_of(network.config) or 4096
