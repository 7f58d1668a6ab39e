"""What a config has the model return beside its logits changes nothing: blocks that are passed return none of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import rankfold
from families import some_ids, tiny_model, tokens


@pytest.mark.parametrize(
    ("family", "flag", "kept"),
    [
        ("mixtral", "output_router_logits", "router_logits"),
        ("llama", "output_hidden_states", "hidden_states"),
        ("llama", "output_attentions", "attentions"),
    ],
)
def test_a_config_that_asks_for_more(family, flag, kept, tmp_path):
    logits = []
    for asked in (False, True):
        model = tiny_model(family)
        model.set_attn_implementation("eager")  # as attention weights need
        setattr(model.config, flag, asked)
        rankfold.compress(model, sparsity=0.2, calibration=tokens(), output=tmp_path / str(asked), device="cpu")
        small = AutoModelForCausalLM.from_pretrained(tmp_path / str(asked), attn_implementation="eager")
        found = small(some_ids())
        assert len(found.get(kept) or ()) >= (2 if asked else 0) and (kept in found) == asked
        logits.append(found.logits)
    torch.testing.assert_close(*logits)
