"""A tiny model from the command line to a loaded checkpoint: what breaks everything fails here, in seconds."""

import json

import pytest
import torch

import rankfold
from families import filled_cache, some_ids
from rankfold._utils.evaluating import cache_for
from saved import save_text, save_tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    return folder


def test_a_compressed_model_has_the_parameters_that_its_record_promises_and_decodes_with_its_cache(place, run):
    code, _, err = run("compress model -o small --sparsity 0.3 --calibration text.txt --device cpu")
    assert code == 0, err
    promised = json.loads((place / "small" / "rankfold.json").read_text())["counts"]["parameters"]
    dense, small = (rankfold.load(place / name, device="cpu") for name in ("model", "small"))
    assert sum(p.numel() for p in small.parameters()) == promised < sum(p.numel() for p in dense.parameters())
    ids = some_ids(1, 12)
    cache = filled_cache(small, ids[:, :8])
    torch.testing.assert_close(small(ids[:, 8:], **cache_for(small, cache)).logits, small(ids).logits[:, 8:])
