"""Text a model writes: the space behind the prompt, settings beside the weights, and what is no number."""

from types import SimpleNamespace

import pytest
import torch

from families import opened
from rankfold.errors import NumericsError
from rankfold.evaluation.generation import continue_text


class Words:
    """Drops the space in front of the first piece it decodes, as SentencePiece does; every id is a word."""

    pad_token_id = 0

    def __call__(self, text: str, **_):
        return SimpleNamespace(input_ids=torch.tensor([[len(word) for word in text.split()]]))

    def decode(self, ids, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" {int(number)}" for number in ids).removeprefix(" ")


@pytest.fixture
def model():
    return opened("llama").model


def test_the_space_behind_the_prompt_stays(model):
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
