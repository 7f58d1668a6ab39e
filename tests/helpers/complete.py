"""Whether all that the files of a checkpoint name is there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from safetensors import safe_open

import rankfold

FILE = re.compile(r"[\w.-]+\.(json|jinja|txt|model|safetensors|bin|py|gguf|tiktoken)")
STALE = ("*.tmp", "block-*", "basis-*", "run.json")  # of a run, not of its result
# What goes beside weights and names code or files, as hubs have them; none of this code is there.
WRITTEN = {
    "config.json": {"auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}},
    "tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
        "special_tokens_map_file": "/somewhere/special_tokens_map.json",
        "vocab_file": "vocabulary.json",
        "name_or_path": "/somewhere/else",
    },
    "preprocessor_config.json": {"auto_map": {"AutoImageProcessor": "image_processing_x.X"}},
    "generation_config.json": {"max_new_tokens": 5},
    "sentence_bert_config.json": {"max_seq_length": 32},
}
COPIED = {  # byte for byte
    "tokenizer.model": b"\x0apieces",
    "merges.txt": b"#version: 0.2\n",
    "modules.json": b'[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]',
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "2_Dense/config.json": b"{}",
    "2_Dense/pytorch_model.bin": b"weights",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "chat_template.jinja": b"{{ messages }}",
}


def surround(folder: Path) -> Path:
    """Put beside a model, with its tokenizer, what people keep there."""
    for name, more in WRITTEN.items():
        found = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(found | more))
    for name, content in COPIED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def assert_complete(folder: Path, source: Path) -> None:
    """Nothing in a folder names a file that is not there, and all of the source is there that is no weight.

    Args:
        folder: a result.
        source: the model it was made of, with a tokenizer, and with what :func:`surround` writes.
    """
    for pattern in STALE:
        assert not list(folder.rglob(pattern)), pattern
    for path in sorted(folder.rglob("*.json")):
        if path.name == "rankfold.json":  # says what the calibration text was called
            continue
        value = json.loads(path.read_text())
        for key, text in strings(value):
            assert not text.startswith("/"), f"{path.name}: {key} is {text}"
            wanted = text if FILE.fullmatch(text) else None
            if key[:1] == ("auto_map",):
                wanted = f"{text.partition('.')[0]}.py"
            if wanted and key[:1] not in (("quantization_config",),):
                assert (path.parent / wanted).is_file(), f"{path.name} names {wanted}, which is not there"
    assert_shards(folder)
    for module in json.loads((folder / "modules.json").read_text()):
        assert (folder / module["path"]).is_dir(), module
    for name, content in COPIED.items():
        assert (folder / name).read_bytes() == content, name
    for name in WRITTEN:
        assert (folder / name).is_file(), name
    assert_reads_alike(folder, source)


def strings(value, key: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """All strings in a JSON value, with the keys to them."""
    if isinstance(value, str):
        yield key, value
    for name, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from strings(part, (*key, name))


def assert_shards(folder: Path) -> None:
    """The index and the files say the same."""
    shards = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert shards == {"model.safetensors"}
        return
    named = json.loads(index.read_text())["weight_map"]
    found = {}
    for name in shards:
        with safe_open(folder / name, framework="pt") as handle:
            found |= dict.fromkeys(handle.keys(), name)
    assert named == found and set(named.values()) == shards


def assert_reads_alike(folder: Path, source: Path) -> None:
    """The tokenizer and the settings for generating, as transformers reads them."""
    tokenizers = [transformers.AutoTokenizer.from_pretrained(place) for place in (folder, source)]
    for text in ("the integers of a class", "</s> <s>"):
        one, other = (tokenizer(text).input_ids for tokenizer in tokenizers)
        assert one == other
    assert len({json.dumps(tokenizer.chat_template) for tokenizer in tokenizers}) == 1
    settings = [transformers.GenerationConfig.from_pretrained(place) for place in (folder, source)]
    assert settings[0].max_new_tokens == settings[1].max_new_tokens == 5
    # A nemotron-nas is known to engines alone.
    if json.loads((folder / "config.json").read_text())["model_type"] != "nemotron-nas":
        for remote in (False, True):
            transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote)
        assert rankfold.load(folder, device="cpu")
