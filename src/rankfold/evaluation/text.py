"""Perplexity of a named model on named texts."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .._utils.sizes import plural
from ..architectures import context_of, family_of
from ..calibration.likelihood import warn_of_guessing
from ..data.special_tokens import frame_of
from ..data.text import Text, read_text, text_source
from ..data.tokens import ids_of
from ..errors import CheckpointError, DataError, OptionError, option
from ..models.dense_model import DenseModel
from .perplexity import perplexity, streamed_perplexity, windows_of

log = logging.getLogger(__name__)

MANY, MOST = 8, 128  # characters of a token: more than there are in most texts, and in any


@dataclass(frozen=True)
class Texts:
    """Texts to compute perplexity on, and how.

    Args:
        names: text sources; see :func:`~rankfold.data.text.read_text`.
        max_length: tokens of a window, ``>= 2``; clamped to the model's context.
        limit: only the first windows of each, ``>= 1``.
        text_column: the column with the text, of files with rows.
        most: name of a text -> windows of it at most, beside ``limit``.
    """

    names: Sequence[str]
    max_length: int = 2048
    limit: int | None = None
    text_column: str = "text"
    most: Mapping[str, int] = field(default_factory=dict)

    def limit_of(self, name: str) -> int | None:
        """Return how many windows of a text are read at most; ``None``: all."""
        return min((most for most in (self.limit, self.most.get(name)) if most), default=None)

    def read(self) -> list[Text]:
        """The texts.

        Raises:
            OptionError, DataError: a number out of range, a text named twice or that cannot be read.
        """
        if self.max_length < 2:
            raise OptionError(
                f"a sample of {plural(self.max_length, 'token')} predicts none; samples of texts have at least 2"
            )
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"limit must be >= 1, got {self.limit}")
        found = [text_source(name, "evaluation") for name in self.names]
        read = [(source.kind, source.origin) for source in found]
        twice = [name for name, source in zip(self.names, read, strict=True) if read.count(source) > 1]
        if twice:
            raise OptionError(f"{option('text')} names {twice[0]!r} more than once; name it once")
        return [self._read(name, MANY) for name in self.names]

    def _read(self, name: str, characters: int) -> Text:
        most = self._characters(name, characters)
        return read_text(name, use="evaluation", column=self.text_column, characters=most)

    def _characters(self, name: str, of_token: int) -> int | None:
        limit = self.limit_of(name)
        return None if limit is None else limit * self.max_length * of_token

    def windows_of(self, text: Text, tokenizer, model: str, config, length: int) -> Tensor:
        """Return the ``(W, T)`` windows of a text that was read; arguments and errors as of :func:`windows_of_text`.

        Tokens of logs and padded tables are long, so more of a text is read where it has fewer windows than wanted.
        """
        limit, asked = self.limit_of(text.name), self._characters(text.name, MANY)
        if asked is not None and sum(map(len, text.documents)) >= asked:  # with fewer, all of it was read
            with contextlib.suppress(DataError):
                windows = windows_of_text(text, tokenizer, model, config, length, limit)
                if len(windows) == limit:
                    return windows
            text = self._read(text.name, MOST)
        return windows_of_text(text, tokenizer, model, config, length, limit)

    def measure(self, model: str, network, tokenizer, texts: list[Text]) -> list[dict]:
        """Of every text what :func:`~rankfold.evaluation.perplexity.perplexity` says, ``text``, and
        ``tokens_per_second`` (tokens of the windows over the time of their forwards and losses).

        Args:
            network: the model, or one that is open to be run one block at a time.
        """
        whole = network.model if isinstance(network, DenseModel) else network
        found, config, length = [], whole.config.get_text_config(), self.max_length
        context = context_of(config) or length
        if length > context:
            log.info("max_length %d is more than the model's context; using %d", length, context)
            length = context
        for text in texts:
            if text.origin in _calibrated_on(whole):
                told = "warning: %s was calibrated or trained on this very text (%s); its perplexity here is too good"
                log.warning(told, model, text.name)
            windows = self.windows_of(text, tokenizer, model, config, length)
            found.append({"text": text.name, **timed_perplexity(network, windows, text.name)})
        return found


def windows_of_text(text: Text, tokenizer, model: str, config, length: int, limit: int | None) -> Tensor:
    """``(W, T)`` windows of a text as a model reads it, with its start token before each where it is lost without.

    Args:
        model: its name, for messages.  config: of its language model.

    Raises:
        DataError: as :func:`~rankfold.evaluation.perplexity.windows_of`, or ids that the embedding does not have.
    """
    frame = frame_of(family_of(config), tokenizer)
    ids = ids_of(text, tokenizer, model, config.vocab_size, **frame.inside)
    return frame.around(windows_of(ids, length - frame.tokens, limit))


def timed_perplexity(network, windows: Tensor, text: str) -> dict:
    """What :func:`~rankfold.evaluation.perplexity.perplexity` says, ``tokens_per_second`` of it, and a ``warning``,
    which names the ``text``, where the model is no better than guessing."""
    begin = time.perf_counter()
    if isinstance(network, DenseModel):
        result = streamed_perplexity(network, windows)
    else:
        result = perplexity(network, windows)
    speed = windows.numel() / (time.perf_counter() - begin)
    warning = warn_of_guessing(result["nll"], network.config.get_text_config().vocab_size, text)
    definition = f"rows joined by a blank line, tokenised once; {result['definition']}"
    return result | {"definition": definition, "tokens_per_second": speed, "warning": warning}


def _calibrated_on(network) -> list[str]:
    """Return the origins of the texts that a compressed model was calibrated or trained on."""
    described = getattr(getattr(network, "hf_quantizer", None), "quantization_config", None)
    fields = getattr(described, "fields", {})
    calibration = fields.get("calibration", {})
    texts = calibration.get("texts", [calibration]) if isinstance(calibration, dict) else None
    trained = fields.get("trained_on", [])
    if (
        not isinstance(trained, list)
        or not isinstance(texts, list)
        or not all(isinstance(text, dict) for text in texts)
    ):
        raise CheckpointError("config.json does not name the calibration set; copy or make the checkpoint again")
    return [*(text.get("origin") for text in texts), *trained]
