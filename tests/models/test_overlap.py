"""Reading ahead and writing behind: the same bytes, the same errors, and really at the same time."""

import threading

import pytest
import torch

import rankfold
from families import opened, tokens
from rankfold import MoDeGPT
from rankfold.checkpoint.blocks import BlockFiles
from rankfold.errors import CheckpointError, NumericsError
from rankfold.models.block_reader import BlockReader
from rankfold.models.dense_model import DenseModel
from saved import save_tiny

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)


@pytest.fixture
def source(tmp_path):
    save_tiny(tmp_path / "model")
    return rankfold.open_model(tmp_path / "model", device="cpu")


def bytes_of(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize("mode", ["sequential", "one-pass"])
def test_overlapping_ends_in_the_same_bytes(source, mode, tmp_path):
    calibration = tokens()
    plain = rankfold.compress(
        source, method=METHOD, calibration=calibration, output=tmp_path / "plain", mode=mode
    ).output
    source.overlaps = True
    overlapped = rankfold.compress(
        source, method=METHOD, calibration=calibration, output=tmp_path / "overlapped", mode=mode
    ).output
    assert bytes_of(plain) == bytes_of(overlapped)


def test_a_cpu_holds_one_block_at_a_time(source):
    assert not source.overlaps


def test_the_next_block_is_read_while_this_one_is_held(source, monkeypatch):
    read, seen = DenseModel.read, []
    done = [threading.Event() for _ in range(len(source))]

    def noting(self, index):
        module = read(self, index)
        done[index].set()
        return module

    monkeypatch.setattr(DenseModel, "read", noting)
    source.overlaps = True
    blocks = BlockReader(source)
    for index in range(len(source)):
        view = blocks(index)
        if view.index + 1 < len(source):
            assert done[view.index + 1].wait(10), "the next block was not read before this one was given back"
        seen.append(view.index)
        for name, tensor in read(source, view.index).state_dict().items():
            assert torch.equal(tensor, view.module.state_dict()[name])
    assert seen == list(range(len(source)))


def test_errors_of_reading_and_writing_come_out(source, monkeypatch, tmp_path):
    source.overlaps = True
    save = BlockFiles.save_block

    def full(self, index, *rest):
        if index == 1:
            raise CheckpointError("no space")
        save(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "save_block", full)
        with pytest.raises(CheckpointError, match="no space"):
            rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / "out")  # goes on
    broken = opened("llama")
    broken.overlaps = True
    broken.blocks[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"model.layers.1.mlp.up_proj.weight has 1 NaN"):
        rankfold.compress(broken, method=METHOD, calibration=tokens())
