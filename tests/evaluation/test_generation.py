"""Text a model writes: the space after the prompt, settings beside the weights, and what is no number."""

import re
from types import SimpleNamespace

import pytest
import torch

from families import opened
from rankfold.errors import DataError, NumericsError, OptionError
from rankfold.evaluation.generation import continue_text


class Words:
    """Drops the space before the first piece it decodes, as SentencePiece does; every id is a word."""

    pad_token_id = 0

    def __call__(self, text: str, **_):
        return SimpleNamespace(input_ids=torch.tensor([[len(word) for word in text.split()]]))

    def decode(self, ids, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" {int(number)}" for number in ids).removeprefix(" ")


def characters():
    """One token a character, and a start token."""

    def encode(text: str, **_):
        return SimpleNamespace(input_ids=torch.tensor([[1, *(2 + ord(c) % 90 for c in text)]]))

    encode.pad_token_id, encode.decode = 0, Words().decode
    return encode


@pytest.fixture
def model():
    return opened("llama").model


def test_the_space_after_the_prompt_stays(model):
    text = continue_text(model, Words(), "once upon", max_new_tokens=3)
    assert text.startswith(" ") and len(text.split()) == 3


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [({"num_beams": 3}, 0.0), ({"num_beams": -4}, 0.0), ({"num_return_sequences": 3, "do_sample": True}, 1.0)],
)
def test_one_text_is_written_whatever_the_settings_ask_for(model, settings, temperature):
    options, rows = {"max_new_tokens": 3, "temperature": temperature}, set()
    expected = continue_text(model, Words(), "once upon", **options)
    model.generation_config.update(**settings)
    model.model.embed_tokens.register_forward_hook(lambda _, args, __: rows.add(len(args[0])))
    assert continue_text(model, Words(), "once upon", **options) == expected
    assert rows == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_written_out_of_nan(model, temperature):
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(NumericsError, match="predicts NaN or infinity; its weights or its config are damaged"):
        continue_text(model, Words(), "once upon", max_new_tokens=3, temperature=temperature)


def advised(message: str, prompt: str, options: dict) -> tuple[str, dict]:
    """What the line says to do, done."""
    if found := re.search(r"last (\d+) characters of the prompt", message):
        prompt = prompt[-int(found[1]) :]
    if found := re.search(r"max_new_tokens=(\d+)", message):
        options = options | {"max_new_tokens": int(found[1])}
    return prompt, options


@pytest.mark.parametrize("text", ["word " * 100, "x", "ab c" * 100, "é" * 90, "a b" * 21], ids=len)
@pytest.mark.parametrize("new", [1, 8, 60, 63, 64, 900])
def test_what_is_advised_for_a_prompt_beyond_the_context_works(model, text, new):
    """At 64 positions; the tokenizer has one token a character and one in front."""
    tokenizer, options, context = characters(), {"max_new_tokens": new}, model.config.max_position_embeddings
    assert context == 64
    try:
        continue_text(model, tokenizer, text, **options)
        assert len(text) + 1 + new <= context
    except (DataError, OptionError) as error:
        assert len(text) + 1 + new > context
        prompt, fewer = advised(str(error), text, options)
        assert (prompt, fewer) != (text, options) and len(prompt) >= min(len(text), context // 2 - 1)
        continue_text(model, tokenizer, prompt, **fewer)


@pytest.mark.parametrize("prompt", ["caf\udce9", "\ud800", b"bytes", None, 3])
def test_a_prompt_that_is_no_text_is_called_that(model, prompt):
    with pytest.raises(DataError, match="the prompt is not UTF-8 text, got .*; convert it"):
        continue_text(model, characters(), prompt)
