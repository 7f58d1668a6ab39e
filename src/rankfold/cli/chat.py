"""`rankfold chat`"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from .._utils.sizes import plural
from ..errors import DataError
from . import common as c
from . import options as o

END = "/exit"


def command(
    model: o.Model,
    system: Annotated[str, typer.Option(help="System message, for a model whose chat template takes one.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer; at most half of the context.")] = 256,
    temperature: o.Temperature = 0.0,
    seed: o.SamplingSeed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Chat with a dense or compressed model.

    Answers appear as they are written. Ctrl-C ends an answer, /exit or Ctrl-D the chat. A file or pipe on stdin has one
    message a line.

    \b
    rankfold chat small
    rankfold chat small --system "Answer in one sentence." --temperature 0.7
    """
    name = o.at_revision(model, revision)
    from ..evaluation.chat import open_conversation

    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    talk = open_conversation(name, system=system, dtype=dtype, device=device, **options)
    told = c.console()
    out = told if json else c.plain(sys.stdout)
    if not talk.has_template:
        told.print(f"{name} has no chat template: it continues your text")
    turns = []
    for message in _messages(prompt="" if json else "> "):
        try:
            if dropped := talk.ask(message):
                told.print(
                    f"the context of {talk.positions} tokens is full: it has no room for your oldest "
                    f"{plural(dropped, 'message')} any more"
                )
        except DataError as error:  # of this message, not of the chat
            told.print(f"rankfold: {error}")
            continue
        answer = talk.answer(lambda text: out.print(text, end=""))
        out.print()
        turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
    c.emit({"model": name, "turns": turns}, json, lambda _: None)


def _messages(prompt: str) -> Iterator[str]:
    """Yield the messages of a user at a terminal, or the lines of a file, blank ones left out."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and arrow keys
        c.console().print(f"Ctrl-C ends an answer, {END} or Ctrl-D the chat")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused message by message
    while True:
        try:
            line = input(prompt if is_typed else "").strip()
        except EOFError:
            if is_typed:
                c.console().print()
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            c.console().print(f"\n{END} or Ctrl-D ends the chat")
            continue
        if line == END:
            return
        if line:
            yield line
