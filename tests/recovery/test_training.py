"""The Trainer of a recovery, one step of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from families import some_ids, tiny_model
from rankfold.errors import OptionError
from rankfold.recovery import training
from rankfold.recovery.options import check_device
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


def test_one_process_trains_on_one_device_whatever_it_sees(monkeypatch, tmp_path):
    def sees_eight(self):
        self._n_gpu = 8
        return torch.device("cpu")

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(sees_eight))
    args = arguments(tmp_path, steps=1, batch=4, length=8, every=1, device=torch.device("cpu"), keep=False)
    assert args.n_gpu == 1 and args.train_batch_size == 4


def test_a_model_on_another_device_than_the_first_is_refused():
    check_device(tiny_model("llama"))
    with pytest.raises(OptionError, match="the first device that the program sees, and the model is on meta:3; give"):
        check_device(SimpleNamespace(device=torch.device("meta:3")))


def test_a_trained_model_is_scored_in_the_precision_in_which_it_was_before(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "trains_in_bf16", lambda device: True)
    student, ids = tiny_model("llama", seed=1), some_ids()
    before = student(ids).logits
    how = {
        "batch": 1,
        "length": ids.shape[1],
        "every": 1,
        "device": student.device,
        "keep": False,
        "learning_rate": 0.0,
    }
    rows = [{"input_ids": row} for row in ids]
    args = arguments(tmp_path, steps=2, **how)
    Distiller(student, args, base=student, teacher=tiny_model("llama"), loss="kl", train_dataset=rows).train()
    assert torch.equal(student.eval()(ids).logits, before)
