"""What is written is complete: by every method, of every family, in every form."""

import json
import shutil

import pytest
import transformers as t

import rankfold
from complete import assert_complete, surround
from families import ANY_MODEL, CONFIGS, CalibrationData, some_ids, tiny_model
from rankfold import make_method
from rankfold.methods import NarrowingMethod
from saved import save_tiny
from tiny_encoders import ENCODERS, samples_of, tiny_encoder

TOKENS = CalibrationData(some_ids(12, 32, seed=1), "random", "random", 0, held_out=some_ids(2, 32, seed=2))
SPARSITY = {"wanda": 0.5, "sparsegpt": 0.5, "pruner-zero": 0.5, "slicegpt+modegpt": 0.5}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return surround(save_tiny(tmp_path_factory.mktemp("complete") / "llama", blocks=2))


def compressed(folder, method: str, output, tokens=TOKENS, part=None):
    source = rankfold.open_model(folder, device="cpu", component=part)
    kind = rankfold.methods.method_class(method)
    options = {"rank_multiple": 2} if issubclass(kind, NarrowingMethod) else {}
    chosen = make_method(method, sparsity=SPARSITY.get(method, 0.3), **options)
    return rankfold.compress(source, method=chosen, calibration=tokens, output=output, mode=chosen.modes[-1]).output


@pytest.mark.parametrize("method", ANY_MODEL)
def test_what_a_method_writes_and_its_exports(llama, method, tmp_path):
    small = compressed(llama, method, tmp_path / "small")
    assert_complete(small, llama)
    stock = "quantization_config" not in json.loads((small / "config.json").read_text())
    for form in ("stock", "deci"):
        try:
            rankfold.export(small, tmp_path / form, form)
        except rankfold.RankfoldError as error:
            assert "\n" not in str(error) and not (tmp_path / form).exists()
            assert stock or "stock" in str(error) or "dense" in str(error), error
        else:
            assert_complete(tmp_path / form, llama)


def with_tokenizer(model, llama, folder):
    """A model beside the tokenizer of another, and what surrounds it."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, folder / name)
    return surround(folder)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family(llama, family, tmp_path):
    place = with_tokenizer(tiny_model(family), llama, tmp_path / "dense")
    assert_complete(compressed(place, "shortgpt", tmp_path / "small"), place)


@pytest.mark.parametrize("family", ["gemma3-images", "gpt2", "gpt_neo", "opt-post-norm", "qwen3"])
def test_exports(llama, family, tmp_path):
    place = with_tokenizer(tiny_model(family), llama, tmp_path / "dense")
    rankfold.export(compressed(place, "modegpt", tmp_path / "small"), tmp_path / "stock")
    for name in ("small", "stock"):
        assert_complete(tmp_path / name, place)


@pytest.mark.parametrize("family", ["bert-head", "clip-text", "qwen3-vl", "vit-head"])
def test_encoders(llama, family, tmp_path):
    place, part = with_tokenizer(tiny_encoder(family), llama, tmp_path / "dense"), ENCODERS[family].part
    source = rankfold.open_model(place, device="cpu", component=part)
    for method in ("modegpt", "shortgpt"):
        assert_complete(compressed(place, method, tmp_path / method, samples_of(source), part), place)


def test_what_is_saved_out_of_memory(llama, tmp_path):
    source = rankfold.open_model(llama, device="cpu")
    for number, method in enumerate((rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2), make_method("shortgpt"))):
        rankfold.save(
            rankfold.compress(source, method=method, calibration=TOKENS).model, tmp_path / str(number), source.tokenizer
        )
        named = json.loads((tmp_path / str(number) / "tokenizer_config.json").read_text())
        assert "auto_map" not in named
        found = json.loads((tmp_path / str(number) / "config.json").read_text()).get("auto_map", {})
        assert all((tmp_path / str(number) / f"{name.partition('.')[0]}.py").is_file() for name in found.values())


def test_a_tokenizer_that_is_given_has_no_files_of_another(llama, tmp_path):
    other = t.AutoTokenizer.from_pretrained(llama)
    source = rankfold.open_model(llama, device="cpu", tokenizer=other)
    rankfold.compress(source, method=make_method("shortgpt"), calibration=TOKENS, output=tmp_path / "small")
    assert not (tmp_path / "small" / "tokenizer.model").exists() and (tmp_path / "small" / "modules.json").exists()


def test_what_lies_beside_a_gguf_file_is_not_its_own(llama, tmp_path):
    rankfold.export(compressed(llama, "modegpt", tmp_path / "small"), tmp_path / "model.gguf", "gguf")
    others = ("modules.json", "merges.txt", "1_Pooling/config.json", "preprocessor_config.json")
    (tmp_path / "1_Pooling").mkdir()
    for name in others:
        shutil.copyfile(llama / name, tmp_path / name)
    source = rankfold.open_model(tmp_path / "model.gguf", device="cpu")
    again = rankfold.compress(
        source, method=make_method("shortgpt"), calibration=TOKENS, output=tmp_path / "again"
    ).output
    assert not any((again / name).exists() for name in others)
