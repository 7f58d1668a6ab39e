"""Which Auto class of transformers a checkpoint is loaded with."""

from typing import Any

import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ..architectures import family_of
from ..errors import UnsupportedModelError

# What a model that is no causal language model may be, the most particular first.
HEADS = (
    *("ImageTextToText", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    *("MultipleChoice", "NextSentencePrediction", "PreTraining", "ImageClassification", "MaskedImageModeling"),
)


def auto_class_name(model: PreTrainedModel) -> str:
    """The name of the Auto class that gives the class of a model."""
    return auto_class(model.config, type(model).__name__).__name__


def auto_class(config, name: str | None = None):
    """The Auto class that gives the class a checkpoint was written by, so that its head is kept.

    Args:
        name: of the class; by default the first of ``config.architectures``, and without any a decoder is a causal
            language model and an encoder has no head.

    Raises:
        UnsupportedModelError: no Auto class gives it.
    """
    family = family_of(config.get_text_config())
    decoder = family is None or family.decoder
    named = name or next(iter(config.architectures or ()), None)
    sees: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    text_alone: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if decoder and text_alone is not None:
        _check_head(config, named, {sees, text_alone})
        both = sees not in (None, text_alone)  # the type also gives the language model of a model that sees
        return AutoModelForImageTextToText if both and named == sees.__name__ else AutoModelForCausalLM
    for auto in (*(getattr(transformers, f"AutoModelFor{head}") for head in HEADS), AutoModel):
        found: Any = auto._model_mapping.get(type(config), None)
        if found is not None and (found.__name__ == named if named else auto is AutoModel):
            if family or auto is AutoModelForImageTextToText:
                return auto
            raise UnsupportedModelError(
                f"model type {config.model_type!r} has no spec, and one is derived only for causal language models and "
                "models for images and text; `rankfold models` lists the encoders there are"
            )
    raise UnsupportedModelError(
        f"model type {config.model_type!r}{f' as {named}' if named else ''} is not one that transformers loads as a "
        "causal language model, an encoder with or without a head, or a model for images and text; "
        "give its language model alone"
    )


def _check_head(config, named: str | None, writing: set[Any]) -> None:
    """Refuse a decoder saved with another head: where its embedding is tied, it would load without that head as one
    that writes text."""
    mappings: list[Any] = [getattr(transformers, f"AutoModelFor{head}")._model_mapping for head in HEADS]
    heads = {mapping.get(type(config), None) for mapping in mappings} - writing - {None}
    if named in {head.__name__ for head in heads}:
        text_alone: Any = AutoModelForCausalLM._model_mapping[type(config)]
        raise UnsupportedModelError(
            f"{named} has no language-model head, and only encoders are compressed with another one; "
            f"give a model that was saved as {text_alone.__name__}"
        )


def check_writes(config, name: str) -> None:
    """Raise :class:`UnsupportedModelError` unless a model writes text and so has a perplexity, tasks and exports."""
    text = config.get_text_config()
    family = family_of(text)
    if family is not None and not family.decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder ({text.model_type}) and predicts no next token, so it has no perplexity, writes no "
            "text and has no form of a decoder; `rankfold inspect` says how far its states have moved, and its own "
            "head is what to evaluate"
        )
