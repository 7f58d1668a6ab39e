"""The config of a written model."""

import torch
import transformers as t

from rankfold.checkpoint.config import name_dtype


def test_a_dtype_is_named_in_all_parts_of_a_config():
    config = t.Qwen2_5OmniConfig()  # its parts have parts
    name_dtype(config, torch.bfloat16)
    found = str(config.to_dict())
    assert found.count("'dtype': 'bfloat16'") == found.count("'dtype'") > 5
