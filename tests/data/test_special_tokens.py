"""Windows of an encoder are whole texts: they stand between the special tokens that its tokenizer puts around one.

Those of a decoder begin anywhere, unless it is lost without its start token.
"""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as t

import rankfold
from families import tiny_model
from rankfold.calibration.forward import forward
from rankfold.data.text import read_text
from rankfold.errors import OptionError
from rankfold.evaluation.text import windows_of_text
from tiny_encoders import tiny_encoder

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer():
    """One id a letter, [CLS] and [SEP] around a text."""
    names = {name: number for number, name in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LETTERS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return t.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(LETTERS[i * i % 26] for i in range(900)))
    return str(tmp_path / "a.txt")


def test_an_encoder_reads_whole_texts_and_a_decoder_does_not(text):
    source = rankfold.open_model(tiny_encoder("bert"), device="cpu", tokenizer=tokenizer())
    found = rankfold.load_calibration(text, source, num_samples=8, max_length=32)
    for windows in (found.ids, found.held_out):
        assert windows.shape[1] == 32
        assert (windows[:, 0] == 1).all() and (windows[:, -1] == 2).all() and (windows[:, 1:-1] > 3).all()
    written = tokenizer()(Path(text).read_text(), add_special_tokens=False).input_ids
    pieces = {tuple(written[i : i + 30]) for i in range(0, 900, 30)}
    assert {tuple(row) for row in found.ids[:, 1:-1].tolist()} <= pieces
    decoder = rankfold.open_model(tiny_model("llama"), device="cpu", tokenizer=tokenizer())
    inside = rankfold.load_calibration(text, decoder, num_samples=8, max_length=32).ids
    assert torch.cat([inside[:, 0], inside[:, -1]]).eq(1).sum() <= 1  # of the first window of the text


def starting():
    """One id a letter, and a start token that it puts before a text."""
    made = tokenizer()
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.bos_token = "[CLS]"
    return made


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_a_model_that_is_lost_without_its_start_token_has_it_in_front_of_every_window(family, text):
    source = rankfold.open_model(tiny_model(family), device="cpu", tokenizer=starting())
    found = rankfold.load_calibration(text, source, num_samples=8, max_length=32)
    evaluated = windows_of_text(read_text(text), source.tokenizer, source.name, source.config, 32, None)
    written = starting()(Path(text).read_text(), add_special_tokens=False).input_ids
    pieces = [tuple(written[i : i + 31]) for i in range(0, 899, 31)]
    for windows in (found.ids, found.held_out, evaluated):
        assert windows.shape[1] == 32 and (windows[:, 0] == 1).all()
        assert {tuple(row) for row in windows[:, 1:].tolist()} <= set(pieces)
    assert len(evaluated) == len(pieces)


def test_other_decoders_begin_anywhere(text):
    source = rankfold.open_model(tiny_model("llama"), device="cpu", tokenizer=starting())
    evaluated = windows_of_text(read_text(text), source.tokenizer, source.name, source.config, 32, 5)
    assert evaluated.flatten().tolist() == starting()(Path(text).read_text()).input_ids[: 5 * 32]


def test_windows_too_short_and_texts_of_its_own_are_refused(text):
    source = rankfold.open_model(tiny_encoder("bert"), device="cpu", tokenizer=tokenizer())
    with pytest.raises(OptionError, match="max_length must be more than the 2 special tokens of a sample, got 2"):
        rankfold.load_calibration(text, source, max_length=2)
    with pytest.raises(OptionError, match="is an encoder and writes no text of its own; calibrate on another text"):
        rankfold.load_calibration("self", source)


def test_positions_after_the_padding_token_shorten_the_context(text):
    roberta = rankfold.open_model(tiny_encoder("xlm-roberta"), device="cpu", tokenizer=tokenizer())
    config = roberta.config
    assert roberta.context_length == config.max_position_embeddings - config.pad_token_id - 1
    assert rankfold.load_calibration(text, roberta, num_samples=2).ids.shape[1] == roberta.context_length
    forward(roberta, roberta.part.example(1, roberta.context_length).clamp_min(3))  # and so many it really takes
    with pytest.raises((IndexError, RuntimeError)):
        forward(roberta, torch.full((1, roberta.context_length + 1), 3))
