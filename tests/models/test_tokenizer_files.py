"""The tokenizer beside a result is the one beside the dense weights, byte by byte, whoever reads it."""

import json
from types import SimpleNamespace

import pytest
import transformers as t

import rankfold
from families import some_ids
from rankfold import MoDeGPT
from rankfold.errors import OptionError
from rankfold.models.tokenizer import TokenizerFiles
from saved import save_tiny

CONFIG = {  # as transformers 4 wrote it
    "add_bos_token": False,
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}},
    "bos_token": "<s>",
    "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "eos_token": "</s>",
    "model_max_length": 128,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
OTHERS = {
    "special_tokens_map.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
    "tokenizer.model": "read by llama.cpp",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


@pytest.fixture
def dense(tmp_path):
    folder = save_tiny(tmp_path / "dense", blocks=2)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def files_of(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json", *OTHERS)}


def compressed(source, output=None):
    tokens = rankfold.CalibrationData(some_ids(4, 32), "random", "random", 0)
    return rankfold.compress(
        source, method=MoDeGPT(sparsity=0.3, rank_multiple=2), calibration=tokens, output=output
    ).model


def test_files_stay_as_they_are_in_a_result_an_export_and_what_is_saved(dense, tmp_path):
    source = rankfold.open_model(dense)
    compressed(source, tmp_path / "small")
    rankfold.export(tmp_path / "small", tmp_path / "stock")
    rankfold.save(compressed(source), tmp_path / "saved", source.tokenizer)
    for name in ("small", "stock", "saved"):
        assert files_of(tmp_path / name) == files_of(dense)


def test_a_tokenizer_that_was_changed_is_written_as_it_is_now(dense, tmp_path):
    source = rankfold.open_model(dense)
    source.tokenizer.add_tokens(["<new>"])
    compressed(source, tmp_path / "small")
    again = t.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert again("<new>").input_ids == [source.tokenizer.convert_tokens_to_ids("<new>")]


def test_a_tokenizer_that_was_made_and_not_read_is_written(dense, tmp_path):
    made = t.PreTrainedTokenizerFast(tokenizer_file=str(dense / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    rankfold.save(compressed(rankfold.open_model(dense)), tmp_path / "saved", made)
    assert t.AutoTokenizer.from_pretrained(tmp_path / "saved")("class").input_ids == made("class").input_ids


def test_of_a_folder_with_a_damaged_tokenizer_nothing_is_copied(dense, tmp_path):
    tokenizer = t.AutoTokenizer.from_pretrained(dense)
    (dense / "tokenizer.json").write_text("{}", encoding="utf-8")
    rankfold.save(compressed(rankfold.open_model(dense, tokenizer=tokenizer)), tmp_path / "saved", tokenizer)
    assert t.AutoTokenizer.from_pretrained(tmp_path / "saved")("class").input_ids == tokenizer("class").input_ids


def test_a_package_that_an_image_processor_lacks_is_named(tmp_path, monkeypatch):
    def lacking(*_, **__):
        raise ImportError("\nAutoImageProcessor requires the Torchvision library but it was not found")

    monkeypatch.setattr("rankfold.models.tokenizer.AutoImageProcessor", SimpleNamespace(from_pretrained=lacking))
    said = r"the image processor in .* needs a package that is not installed \(AutoImageProcessor requires"
    with pytest.raises(OptionError, match=said):
        TokenizerFiles(tmp_path).load_image_processor()
