"""The Trainer of a recovery, one step of it."""

import pytest
import torch

from families import some_ids, tiny_model
from rankfold.recovery import training
from rankfold.recovery.training import Distiller, arguments


@pytest.mark.parametrize("bf16", [True, False])
def test_a_step_runs_the_dense_model_and_both_heads_in_the_precision_of_the_trained_one(monkeypatch, tmp_path, bf16):
    monkeypatch.setattr(training, "trains_in_bf16", lambda device: bf16)
    student, teacher, ids, found = tiny_model("llama", seed=1), tiny_model("llama"), some_ids(), []
    for model in (student, teacher):
        for module in (model.lm_head, model.model.layers[0].mlp.gate_proj):
            module.register_forward_hook(lambda module, given, output: found.append(output.dtype))
    args = arguments(tmp_path, steps=1, batch=1, length=8, every=1, device=student.device, keep=False)
    trainer = Distiller(student, args, base=student, teacher=teacher, loss="kl")
    trainer.compute_loss(student, {"input_ids": ids})
    assert len(found) >= 4 and set(found) == {torch.bfloat16 if bf16 else torch.float32}
