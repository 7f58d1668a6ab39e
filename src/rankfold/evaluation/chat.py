"""A conversation with a model: by its chat template, or as one text that both sides continue."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from .._utils.sizes import plural
from ..architectures import context_of
from ..checkpoint.load import load_model, load_tokenizer
from ..data.tokens import tokenised
from ..errors import DataError, OptionError, RankfoldError, first_line, option
from ..models.auto_classes import check_writes
from .generation import check_sampling, generate_ids, text_after


def open_conversation(model: str | Path, *, dtype: str = "auto", device: str = "auto", **options) -> "Conversation":
    """Load a model by name and start a conversation; see :class:`Conversation` for the options."""
    check_sampling(options["max_new_tokens"], options["temperature"])
    network = load_model(model, dtype=dtype, device=device)
    check_writes(network.config, str(model))
    return Conversation(network, load_tokenizer(model), **options)


class Conversation:
    """Turns of a user and a model.

    Where the tokenizer has a chat template, it writes the turns out. A base model has none: then the turns are one
    text, a line of the user continued by the model.

    Args:
        system: the first message, which a template shows before all turns.
        max_new_tokens: of an answer; at most half of the model's context.
        temperature: 0: always the most likely token.
        seed: of the sampling.

    Attributes:
        turns: messages of role and content, oldest first, without the system message.

    Raises:
        OptionError: a value out of range, or a system message for a model whose template takes none.
    """

    def __init__(
        self, model, tokenizer, *, system: str = "", max_new_tokens: int = 256, temperature: float = 0.0, seed: int = 0
    ):
        check_sampling(max_new_tokens, temperature)
        self.model, self.tokenizer, self.temperature, self.seed = model, tokenizer, temperature, seed
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []
        config = model.config.get_text_config()
        self.vocabulary, self.positions = config.vocab_size, context_of(config)
        self.max_new_tokens = min(max_new_tokens, self.positions // 2) if self.positions else max_new_tokens
        if system:
            self._check_system()

    @property
    def has_template(self) -> bool:
        """Whether a chat template writes the turns out."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def ask(self, message: str) -> int:
        """Add a message of the user, and drop the oldest turns where the context has no room for all and an answer.

        Returns:
            The number of dropped questions, each with its answer.

        Raises:
            DataError: the message is no text, the template does not take it, or it is longer than the context; the
                turns are then as they were.
        """
        turns = [*self.turns, {"role": "user", "content": message}]
        dropped = 0
        while not self._fits(ids := self._ids(turns)):
            if len(turns) == 1:
                raise DataError(
                    f"a message of {plural(len(ids), 'token')} and an answer of {self.max_new_tokens} are more than "
                    f"the model's context of {self.positions}; write a shorter one, or choose a smaller "
                    f"{option('max_new_tokens')}"
                )
            turns, dropped = turns[2:], dropped + 1
        self.turns = turns
        return dropped

    def answer(self, show: Callable[[str], None]) -> str:
        """Let the model answer the last message.

        Args:
            show: gets each piece of text as soon as it is written.

        Returns:
            The answer; where Ctrl-C ended it, the part that was written.

        Raises:
            CheckpointError: the model's generation settings are damaged.
            NumericsError: the model predicts NaN.
        """
        ids = self._ids(self.turns)
        stream = _Stream(self.tokenizer, show)
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        try:
            generate_ids(
                self.model, self.tokenizer, ids[None], seed=self.seed + len(self.turns), streamer=stream, **options
            )
        except KeyboardInterrupt:
            stream.end()
        except RankfoldError:
            self.turns.pop()  # a question without an answer
            raise
        text = text_after(self.tokenizer, ids, torch.tensor(stream.written, dtype=ids.dtype))
        self.turns.append({"role": "assistant", "content": text})
        return text

    def _fits(self, ids: Tensor) -> bool:
        return not self.positions or len(ids) + self.max_new_tokens <= self.positions

    def _ids(self, turns: list[dict[str, str]]) -> Tensor:
        """Return the ``(n,)`` token ids of turns, up to where the model goes on."""
        name = type(self.model).__name__
        if not self.has_template:
            text = "".join(turn["content"] + "\n" * (turn["role"] == "assistant") for turn in turns)
            return tokenised(self.tokenizer, text, name, self.vocabulary)
        try:
            text = self.tokenizer.apply_chat_template(
                [*self.system, *turns], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of its author and raises whatever it likes
            raise DataError(
                f"the model's chat template does not take this conversation ({first_line(error)}); "
                "try `rankfold generate`"
            ) from error
        return tokenised(self.tokenizer, text, name, self.vocabulary, add_special_tokens=False)

    def _check_system(self) -> None:
        if not self.has_template:
            raise OptionError(f"{option('system')} needs a chat template, and the model has none; leave it out")
        try:
            self._ids([{"role": "user", "content": "Hello"}])
        except DataError as error:
            raise OptionError(f"{option('system')}: {error}; or leave it out") from error


class _Stream(TextStreamer):
    """Passes the text of new tokens on, and keeps their ids."""

    def __init__(self, tokenizer, show: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.written = show, []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.written += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.show(text)
