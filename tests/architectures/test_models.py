"""The list of models: what people name, every family once at least, and the same in command and documents."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rankfold.architectures import MODELS, PARTS, known_architectures, part_of
from rankfold.cli.models import rows_of_models
from rankfold.errors import OptionError

ROOT = Path(__file__).parents[2]
FAMILIES = {architecture.model_type for architecture in known_architectures()}
COMPOSED = [model for model in MODELS if model.model_type not in FAMILIES]


def test_every_model_is_one_of_transformers_and_every_family_is_of_a_model():
    types = [model.model_type for model in MODELS]
    assert len(set(types)) == len(types) and set(types) <= set(CONFIG_MAPPING)
    assert {family for model in MODELS for family in model.parts.values()} == FAMILIES | {"projector"}


def test_no_inner_type_is_listed_as_a_model():
    """What only stands inside of another model has no weights of its own that anybody names."""
    types = {model.model_type for model in MODELS}
    assert not {name for name in types if name.endswith(("_vision", "_vision_model", "_text_model", "_vl_text"))}
    assert {
        "llava",
        "llava_next",
        "idefics3",
        "smolvlm",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "gemma3",
        "clip",
    } <= types


@pytest.mark.parametrize("model", COMPOSED, ids=lambda model: model.model_type)
def test_the_parts_are_those_of_the_model_itself(model):
    """As transformers makes it by default, without numbers."""
    config = CONFIG_MAPPING[model.model_type]()
    config.get_text_config().pad_token_id = None  # some versions of transformers have one beyond the vocabulary
    auto = transformers.AutoModel if model.kind == "encoder" else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        made = auto.from_config(config)
    found = {}
    for name in PARTS:
        try:
            found[name] = part_of(made, name).architecture.model_type
        except OptionError:
            continue
    assert found == dict(model.parts)


@pytest.mark.parametrize("model", [m for m in MODELS if m.model_type in FAMILIES], ids=lambda model: model.model_type)
def test_a_model_of_one_part_is_that_family(model):
    (part,) = model.parts
    assert part in PARTS and model.parts[part] == model.model_type in FAMILIES
    takes_images = "image_size" in CONFIG_MAPPING[model.model_type]().to_dict()
    assert (part == "vision") == takes_images


def test_the_command_lists_all_of_them(run, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it, and tables would be cut
    code, out, _ = run("models --json")
    rows = json.loads(out)["models"]
    assert code in (0, None) and rows == rows_of_models()
    assert [(row["model_type"], row["component"]) for row in rows] == [
        (m.model_type, part) for m in MODELS for part in m.parts
    ]
    table = run("models")[1]
    assert all(model.name in table for model in MODELS)


@pytest.fixture
def place(tmp_path):
    return tmp_path
