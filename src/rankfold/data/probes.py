"""Short texts of several kinds that come with the package, as a model reads them: the same for every model and every
run.

They show what a calibration text may not: a model that was fitted to prose can forget how to write code. All were
written for this purpose, so that no training set has them by heart.

Shape legend: S passages, T tokens of the longest one.
"""

import functools
import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, DataError, first_line
from .special_tokens import Frame, frame_of
from .tokens import tokenised

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "probe_texts"
SEPARATOR = "\n%%\n"  # between the passages of a file
KINDS = ("prose", "web text", "source code", "dialogue", "arithmetic", "other languages")
LENGTH = 128  # tokens of a passage; what is longer is cut
TEMPLATE, PLAIN = "the model's chat template", "plain text"
# Templates may print the date: what a run measures would change from one day to the next.
DATE = "1 January 2025"
TODAY = f"{{%- macro strftime_now(form) -%}}{DATE}{{%- endmacro -%}}"  # in place of the function that templates call


class Probes(NamedTuple):
    """Passages of all kinds."""

    ids: Tensor  # (S, T) int64; behind the end of a passage its last token is repeated, which no earlier token sees
    lengths: tuple[int, ...]  # tokens of each passage
    kinds: tuple[str, ...]  # of each passage
    dialogue: str  # how turns are written


def one_of_each(probes: Probes) -> Tensor:
    """Return the longest passage of each kind, ``(K, t)``, all of them as long as the shortest."""
    rows = {}
    for row, kind in enumerate(probes.kinds):
        rows[kind] = max(rows.get(kind, row), row, key=probes.lengths.__getitem__)
    return probes.ids[list(rows.values()), : min(probes.lengths[row] for row in rows.values())]


@functools.cache
def passages_of(kind: str) -> tuple:
    """Return the passages of a kind: texts, or lists of messages."""
    name = kind.replace(" ", "_")
    if kind == "dialogue":
        return tuple(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    return tuple((FOLDER / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n").split(SEPARATOR))


def most_tokens(source) -> int:
    """Return how many tokens the passages have at most, padding included; 0 where the model reads none."""
    if not (source.architecture.decoder and source.processors.has_tokenizer):
        return 0
    return LENGTH * sum(len(passages_of(kind)) for kind in KINDS)


def load_probes(source) -> Probes:
    """Tokenise the probe texts for a decoder.

    Args:
        source: an open model with a tokenizer.

    Raises:
        CheckpointError: the tokenizer cannot be read or used.
        DataError: it gives ids that the embedding does not have, or a text of less than two tokens; or the context has
            no room for one.
    """
    tokenizer, frame = source.tokenizer, frame_of(source.architecture, source.tokenizer)
    room = min(LENGTH, source.part.positions or LENGTH) - frame.tokens
    if room < 2:
        raise DataError(f"the context of {source.name} has no room for a text of two tokens")
    written, dialogue = _dialogues(tokenizer, source.name)
    rows, kinds = [], []
    for kind in KINDS:
        for passage in written if kind == "dialogue" else passages_of(kind):
            ids = _ids(source, frame, passage, templated=kind == "dialogue" and dialogue == TEMPLATE)
            # The end of a dialogue says more than what a template puts before it.
            rows.append(frame.around((ids[-room:] if kind == "dialogue" else ids[:room])[None])[0])
            kinds.append(kind)
    if min(map(len, rows)) < 2:
        raise DataError(f"the tokenizer of {source.name} makes a single token of a probe text, which predicts nothing")
    longest = max(map(len, rows))
    padded = [torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows]
    return Probes(torch.stack(padded), tuple(map(len, rows)), tuple(kinds), dialogue)


def _ids(source, frame: Frame, passage: str, *, templated: bool) -> Tensor:
    """``(n,)`` token ids without the frame."""
    options = {"add_special_tokens": False} if templated else frame.inside
    ids = tokenised(source.tokenizer, passage, source.name, source.config.vocab_size, **options)
    begins = len(frame.before) > 0 and tuple(ids[: len(frame.before)].tolist()) == frame.before
    return ids[len(frame.before) :] if begins else ids  # a template may write the start token itself


def _dialogues(tokenizer, name: str) -> tuple[list[str], str]:
    """Dialogues as text, and how they are written."""
    dialogues = passages_of("dialogue")
    if getattr(tokenizer, "chat_template", None):
        try:
            return [_templated(tokenizer, messages, name) for messages in dialogues], TEMPLATE
        except CheckpointError as error:
            log.info("%s: dialogues are plain text", error)
    return ["\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in turns) for turns in dialogues], PLAIN


def _templated(tokenizer, messages: list[dict], name: str) -> str:
    """A dialogue in the model's own format.

    Templates of models for images and text may expect lists of contents and leave out plain strings without an error.
    """
    listed = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for turns in (messages, listed):
        try:
            template = TODAY + tokenizer.get_chat_template()
            text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, date_string=DATE)
        except Exception as error:  # a template is a program: it ends in whatever type it raises
            raise CheckpointError(f"the chat template of {name} cannot be used ({first_line(error)})") from error
        if all(m["content"] in text for m in messages):
            return text
    raise CheckpointError(f"the chat template of {name} leaves out what is said")
