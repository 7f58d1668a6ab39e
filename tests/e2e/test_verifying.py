"""A checkpoint is read back and compared with what was in memory before it is called finished."""

import copy

import pytest
import torch

import rankfold
from families import KINDS, some_ids, tiny_model, tokens
from rankfold import LatentLLM, MoDeGPT
from rankfold.checkpoint.blocks import BlockFiles
from rankfold.compression.verify import Probe
from rankfold.errors import CheckpointError


@pytest.mark.parametrize("family", KINDS)
def test_logits_of_a_stream_are_the_models_own(family):
    source = rankfold.open_model(tiny_model(family), device="cpu")
    probe = Probe(source)
    for index in range(len(source)):
        probe.follow(source.block(index))
    with torch.no_grad():
        whole = source.model(probe.ids).logits
    torch.testing.assert_close(rankfold.calibration.runner.outputs(source, probe.ids, probe.stream), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_precision_passes(family, dtype, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "model")
    source = rankfold.open_model(tmp_path / "model", dtype=dtype, device="cpu")
    method = LatentLLM(sparsity=0.3, rank_multiple=1) if family == "gpt2" else MoDeGPT(sparsity=0.3, rank_multiple=2)
    folder = rankfold.compress(source, method=method, calibration=tokens(32), output=tmp_path / "small").output
    assert torch.isfinite(rankfold.load(folder)(some_ids()).logits).all()


@pytest.mark.parametrize(("scale", "dtype"), [(0, "float32"), (1e-8, "float16")])
def test_logits_that_are_all_but_zero_are_no_damage(scale, dtype, tmp_path):
    """As of a head that begins with zeros; in fp16 what is left of such small ones is rounding."""
    model = tiny_model("llama")
    model.lm_head.weight.data *= scale
    source = rankfold.open_model(model, dtype=dtype, device="cpu")
    method = MoDeGPT(sparsity=0.3, rank_multiple=2)
    folder = rankfold.compress(source, method=method, calibration=tokens(32), output=tmp_path / "small").output
    assert rankfold.load(folder)(some_ids()).logits.abs().max() < 1e-6


@pytest.mark.parametrize("damaged", [None, "embed_tokens", "down_proj"])
def test_roundings_of_embeddings_that_a_model_makes_more_of_are_no_damage(damaged):
    """As of a model that was destroyed: what is written begins almost alike, and ends as something else."""
    model, noise = tiny_model("llama"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(30.0 if "q_proj" in name or "k_proj" in name else 1.0)
    written = copy.deepcopy(model)
    with torch.no_grad():
        weight = written.model.embed_tokens.weight
        weight.add_(1e-3 * weight.std() * torch.randn(weight.shape, generator=noise))
        for name, weight in written.named_parameters():
            if damaged and damaged in name:
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=noise))
    source = rankfold.open_model(model, device="cpu")
    probe = Probe(source, tolerance=2e-3)
    for index in range(len(source)):
        probe.follow(source.block(index))
    again = rankfold.open_model(written, device="cpu")
    if damaged:
        with pytest.raises(CheckpointError, match="computes other logits"):
            probe.compare(again)
    else:
        assert probe.compare(again) > probe.tolerance


def test_a_checkpoint_that_computes_something_else_is_not_finished(tmp_path, monkeypatch):
    """Names and shapes agree; one matrix is another."""
    keep = BlockFiles.save_block

    def damage(self, index, module, dtype, result):
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        keep(self, index, module, dtype, result)
        module.load_state_dict(state | {"mlp.down_proj.weight": state["mlp.down_proj.weight"].flip(0)})

    monkeypatch.setattr(BlockFiles, "save_block", damage)
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    with pytest.raises(CheckpointError, match="computes other logits"):
        rankfold.compress(
            source, method=MoDeGPT(sparsity=0.3, rank_multiple=2), calibration=tokens(32), output=tmp_path / "small"
        )
    assert not (tmp_path / "small").exists()
