"""A model named by hub id, against a stand-in for the hub (one that cannot be reached: `test_cli.py`)."""

import fnmatch

import huggingface_hub

import rankfold
from saved import save_tiny

HUB = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "vocab.txt"]
NOT_WANTED = [
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "modeling.py",
    "model.onnx",
]


def test_a_hub_id_opens_what_was_downloaded(tmp_path, monkeypatch):
    folder, calls = save_tiny(tmp_path / "model"), []

    def download(name, **kwargs):
        calls.append((name, kwargs))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = rankfold.open_model("someone/tiny", device="cpu")
    assert source.name == "someone/tiny" and source.streamed and len(source) == 4
    ((name, patterns),) = calls
    assert name == "someone/tiny"

    def fetched(file):
        allowed, ignored = ([fnmatch.fnmatch(file, p) for p in patterns[f"{k}_patterns"]] for k in ("allow", "ignore"))
        return any(allowed) and not any(ignored)

    assert all(map(fetched, HUB)) and not any(map(fetched, NOT_WANTED))
