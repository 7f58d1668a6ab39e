"""What attention mixes is computed once where it stays, and the result is the same to the bit."""

from dataclasses import replace

import pytest
import torch

import rankfold
from families import opened, some_ids, tokens
from rankfold.calibration.runner import Stream, advance, attend, start
from rankfold.compression.replace import replace as put
from rankfold.methods import BlockResult, make_method
from rankfold.methods.base import spared_passes
from rankfold.methods.modegpt.attention import compress_attention
from rankfold.modules.attention import CompressedAttention
from tiny_encoders import ENCODERS, opened_encoder, packed

RANKS = {"qk": 4, "vo": 6, "mlp": 24}


@pytest.fixture
def mixing(monkeypatch):
    """The number of times that attention has mixed values."""
    counted, plain = [], CompressedAttention.mix

    def mix(self, *args, **kwargs):
        counted.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(CompressedAttention, "mix", mix)
    return counted


def compressed_block(source, stream):
    """A block whose attention alone is compressed."""
    method, view, result = make_method("modegpt", sparsity=0.3, rank_multiple=2), source.block(0), BlockResult()
    ranks = {"qk": 4, "vo": 6} if not view.attention.norms else {"vo": 6}
    moments = rankfold.calibration.runner.measure(view, stream, method.statistics(view), step=False)
    compress_attention(method, view, moments, ranks, result)
    return put(view, result, source)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon-gqa", "qwen3", "bert", "gpt_neox", "bloom", "qwen2-vl"])
def test_later_passes_take_what_was_mixed_and_a_new_output_projection_reads_it(family, mixing):
    source = opened_encoder(family) if family in ENCODERS else opened(family)
    ids = tuple(packed(seed, (4, 6)) for seed in range(3)) if source.part.packed else some_ids(12, 16)
    stream = start(source, ids, autocast=None, most=64)
    view = compressed_block(source, stream)
    kept, fresh, batches = stream.copy(), stream.copy(), len(stream.hidden)
    assert batches == 3
    kept.keep_mixed(view.attention.module)
    attend(view, kept)
    assert kept.copy().mixed is None  # it goes its own way
    assert len(mixing) == batches
    with torch.no_grad():
        view.attention.output_module.weight.mul_(0.5)
    advance(view, kept)
    assert len(mixing) == batches
    advance(view, fresh)
    assert len(mixing) == 2 * batches
    assert all(torch.equal(a, b) for a, b in zip(kept.hidden, fresh.hidden, strict=True))
    assert "mix" not in vars(view.attention.module)


def test_it_is_not_kept_off_the_device_nor_of_a_dense_attention(tmp_path):
    source = opened("llama")
    stream = start(source, some_ids(4, 16), autocast=None)
    dense = source.block(1).attention.module
    attention = compressed_block(source, stream).attention.module
    for other, module in (
        (replace(stream, offload=rankfold.calibration.offload.Offload(source.device, tmp_path)), attention),
        (stream, dense),
    ):
        other.keep_mixed(module)
        assert other.mixed is None
    stream.keep_mixed(attention)
    assert stream.mixed is not None


@pytest.mark.parametrize("options", [{}, {"residual_correction": False}, {"modules": ("qk", "vo")}], ids=str)
def test_a_compression_mixes_once_and_ends_in_the_same_weights(options, mixing, monkeypatch):
    method = make_method("rankfold", sparsity=0.3, rank_multiple=2, allocation="uniform", **options)

    def compressed():
        mixing.clear()
        source = opened("llama")
        result = rankfold.compress(source, method=method, calibration=tokens())
        return dict(result.model.state_dict()), len(mixing)

    found, few = compressed()
    monkeypatch.setattr(Stream, "keep_mixed", lambda *_: None)
    wanted, many = compressed()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    blocks, streams = len(opened("llama")), 2  # calibration and held-out samples, a batch each
    steps = method.stages(opened("llama").block(0), RANKS if "modules" not in options else {"qk": 4, "vo": 6})
    assert many - few == blocks * streams * spared_passes(steps) > 0


def test_passes_are_spared_after_the_step_that_attention_stays_from():
    view = opened("llama").block(0)

    def spared(name, ranks, **options):
        return spared_passes(make_method(name, sparsity=0.3, rank_multiple=2, **options).stages(view, ranks))

    attention = {"qk": 4, "vo": 6}
    assert spared("rankfold", RANKS) == 2  # the MLP's and the last one; that of the output projection mixes
    assert spared("rankfold", RANKS, residual_correction=False) == 1
    assert spared("rankfold", attention, modules=("qk", "vo")) == 1
    assert spared("rankfold", {"mlp": 24}, modules=("mlp",)) == 0
    assert spared("modegpt", RANKS) == spared("latentllm", {"q": 4, "up": 8}) == 0
    assert spared("rankfold", {"qk": 8, "vo": 0, "mlp": 24}, allow_module_removal=True) == 1
