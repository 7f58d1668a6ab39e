"""Token ids of texts, and whether a model can run on samples.

Shape legend: S samples, T tokens of one.
"""

import logging

from torch import Tensor

from .._utils.sizes import plural
from ..errors import CheckpointError, DataError, first_line
from .batches import Data, Example, tokens_in
from .chats import has_half_character
from .special_tokens import frame_of
from .text import Text

log = logging.getLogger(__name__)


def encode(text: Text, source) -> Tensor:
    """``(n,)`` token ids of a text, checked against the model's vocabulary; without the special tokens that stand
    around every window of it.

    Raises:
        DataError: the tokenizer gives ids that the embedding does not have.
    """
    inside = frame_of(source.architecture, source.tokenizer).inside
    return ids_of(text, source.tokenizer, source.name, source.config.vocab_size, **inside)


def ids_of(text: Text, tokenizer, name: str, vocabulary: int, **options) -> Tensor:
    """Return the ``(n,)`` token ids of a text; arguments as for :func:`tokenised`. A chat template writes its special
    tokens itself."""
    options |= {"add_special_tokens": False} if text.has_chats else {}
    return tokenised(tokenizer, text.joined(tokenizer, name), name, vocabulary, **options)


def tokenised(tokenizer, text: str, name: str, vocabulary: int, **options) -> Tensor:
    """``(n,)`` int64 token ids.

    Args:
        name: of the model, for messages.
        options: of the tokenizer's call.

    Raises:
        CheckpointError: the tokenizer cannot be used, or makes nothing of a text.
        DataError: the text is not Unicode, or the tokenizer gives ids that the embedding does not have.
    """
    if has_half_character(text):
        raise DataError("the text has half a character (a lone surrogate) in it: it is not UTF-8; convert it")
    try:
        ids = tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids[0].long()
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # settings that are no settings
        raise CheckpointError(
            f"the tokenizer of {name} cannot be used ({first_line(error)}); "
            "put its own tokenizer files next to the weights"
        ) from error
    if text.strip() and not ids.numel():
        raise CheckpointError(
            f"the tokenizer of {name} makes no tokens of a text of {plural(len(text), 'character')}; put its own "
            "tokenizer files next to the weights"
        )
    check_vocabulary(ids, vocabulary)
    return ids


def check_fits(ids: Data, source) -> None:
    """Whether a model can run on these windows, images or examples.

    Raises:
        DataError: an id has no embedding, windows are longer than the positions the model has, images have another
            shape than it takes, or it takes no image-text examples.
    """
    if not isinstance(ids, Tensor):
        return _check_examples(ids, source)
    if source.part.takes_images:
        return _check_pixels(ids, source)
    if ids.dim() != 2:
        raise DataError(
            f"the {source.part.name} component of {source.name} takes token ids, got images; calibrate on text"
        )
    check_vocabulary(ids, source.config.vocab_size)
    if source.part.positions and ids.shape[1] > source.part.positions:
        raise DataError(
            f"samples of {ids.shape[1]} tokens are longer than the model's context of {source.part.positions}; "
            "cut them shorter"
        )


def _check_examples(examples: tuple[Example, ...], source) -> None:
    texts = [example.ids for example in examples if example.ids is not None]
    if not texts and source.part.packed:
        return
    if len(texts) < len(examples):
        raise DataError(
            f"the {source.part.name} component of {source.name} takes no images of any size by themselves; calibrate "
            f"on {'images of one size' if source.part.takes_images else 'text or image-text examples'}"
        )
    if source.part.takes_images or (source.image_token is None and any(example.images for example in examples)):
        raise DataError(
            f"the {source.part.name} component of {source.name} takes no image-text examples; calibrate on "
            f"{'images' if source.part.takes_images else 'text'}"
        )
    longest = max(example.tokens for example in examples)
    if source.part.positions and longest > source.part.positions:
        raise DataError(
            f"an example of {longest} tokens, images among them, is longer than the model's context of "
            f"{source.part.positions}; leave it out, or have its images made smaller"
        )
    image_token = -1 if source.image_token is None else source.image_token
    for ids in texts:
        check_vocabulary(ids[ids != image_token], source.config.vocab_size)
        if not (ids[:, 1:] != image_token).any():
            raise DataError("an example has no text after its first token, so nothing can be predicted; leave it out")


def _check_pixels(pixels: Tensor, source) -> None:
    part = source.part
    wanted = "any size, an example each" if part.packed else f"{list(part.image_shape)} (channels, height, width)"
    if part.packed or pixels.shape[1:] != part.image_shape:
        raise DataError(
            f"the {part.name} component of {source.name} takes images of {wanted}, got {list(pixels.shape[1:])}; "
            "calibrate on a folder of images"
        )


def say_if_few(ids: Data, source) -> None:
    """Log a line where there are fewer tokens than the widest moment has dimensions: it has no full rank then."""
    widths = (
        (view.attention.output.weight.shape[1], view.mlp.hidden if view.mlp else 0) for view in source.meta_blocks()
    )
    widest = max(map(max, widths))
    tokens = tokens_in(ids, source.part)
    if tokens < widest:
        log.warning(
            "%d calibration tokens are too few: the widest moment has %d dimensions and needs at least as many, better "
            "four times; give more or longer samples",
            *(tokens, widest),
        )


def check_vocabulary(ids: Tensor, vocabulary: int) -> None:
    """Raise :class:`DataError` where an id has no embedding."""
    if ids.numel() and int(ids.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer gives token id {int(ids.max())}, the model has {vocabulary} embeddings; tokenizer and "
            "model do not belong together"
        )
