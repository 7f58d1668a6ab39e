"""Shards of a checkpoint and their index."""

import gc
import json
import warnings

import torch

from rankfold.checkpoint.shards import Shards


def test_the_index_has_the_bytes_of_all_tensors_and_no_file_stays_open(tmp_path):
    shards = Shards(tmp_path, 1)
    shards.write(0, {"a": torch.zeros(3, 5)})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        shards.finish({"b": torch.zeros(7, dtype=torch.bfloat16)})
        gc.collect()
    assert not found
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 15 + 2 * 7
