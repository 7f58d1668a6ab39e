"""A GGUF file is de-quantised to fp32 and written in bf16 unless a dtype is asked for; the plan has bytes of both."""

import json
import logging
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import rankfold
from families import some_ids
from rankfold import CalibrationData
from rankfold.cli import main
from rankfold.errors import CheckpointError
from rankfold.models import opening
from saved import save_gguf, save_text, save_tiny

METHOD = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
DTYPES = [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    save_gguf(save_tiny(folder / "model", blocks=2), folder / "tiny.gguf")
    save_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def dense(place):
    """What transformers de-quantises."""
    return transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file="tiny.gguf", dtype=torch.float32)


def tokens() -> CalibrationData:
    return CalibrationData(some_ids(16, 32, seed=1), "random", "random", 0, held_out=some_ids(2, 32, seed=2))


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize(("asked", "written"), DTYPES)
def test_the_folder_and_the_model_in_memory_have_the_dtype_and_the_same_numbers(place, tmp_path, asked, written):
    source = rankfold.open_model(place / "tiny.gguf", dtype=asked, device="cpu")
    assert (source.dtype, source.compute_dtype) == (written, torch.float32)
    folder = rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / "out").output
    model = rankfold.compress(source, method=METHOD, calibration=tokens()).model
    state, on_disk = model.state_dict(), stored(folder)
    assert {tensor.dtype for tensor in on_disk.values() if tensor.is_floating_point()} == {written}
    for name, tensor in on_disk.items():
        assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype
    assert rankfold.load(folder, device="cpu").dtype == written
    record = json.loads((folder / "rankfold.json").read_text())
    assert record["dtype"] == str(written).removeprefix("torch.")


@pytest.mark.parametrize(("asked", "written"), DTYPES)
def test_dense_weights_are_the_dequantised_ones_rounded_to_what_is_written(place, dense, asked, written):
    source = rankfold.open_model(place / "tiny.gguf", dtype=asked, device="cpu")
    for name, tensor in source.block(0).module.state_dict().items():
        assert torch.equal(tensor, dense.model.layers[0].state_dict()[name].to(written).float())
    assert torch.equal(source.outer_state()["lm_head.weight"], dense.lm_head.weight.to(written))


def test_nothing_is_removed_at_sparsity_0_but_digits(place, dense):
    source = rankfold.open_model(place / "tiny.gguf", device="cpu")
    model = rankfold.compress(
        source, method=rankfold.MoDeGPT(sparsity=0, rank_multiple=2), calibration=tokens()
    ).model.float()
    with torch.no_grad():
        got, expected = (m(some_ids(2, 32)).logits for m in (model, dense))
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_the_fingerprint_is_that_of_the_file_whatever_is_written(place):
    """So moments and runs are told apart by their dtype, and by nothing else."""
    sources = [rankfold.open_model(place / "tiny.gguf", dtype=dtype, device="cpu") for dtype, _ in DTYPES]
    assert len({source.fingerprint for source in sources}) == 1
    moments = [rankfold.calibrate(source, tokens()) for source in sources]
    assert moments[0].identity == moments[1].identity
    assert moments[0].identity | {"dtype": "float32"} == moments[2].identity
    with pytest.raises(CheckpointError, match="were measured on weights in float32, not bfloat16; use that dtype"):
        rankfold.compress(sources[0], method=METHOD, moments=moments[2])


def test_a_run_goes_on_with_the_dtype_it_began_with(place, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    first, again, other = (
        rankfold.open_model(place / "tiny.gguf", dtype=d, device="cpu") for d in ("auto", "bf16", "fp32")
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rankfold.checkpoint.run.RunFolder.write_rest", stop)
        rankfold.compress(first, method=METHOD, calibration=tokens(), output=tmp_path / "out")
    with pytest.raises(CheckpointError, match="is an unfinished run of another configuration"):
        rankfold.compress(other, method=METHOD, calibration=tokens(), output=tmp_path / "out")
    whole = rankfold.compress(first, method=METHOD, calibration=tokens(), output=tmp_path / "whole").output
    resumed = rankfold.compress(again, method=METHOD, calibration=tokens(), output=tmp_path / "out").output
    assert all(torch.equal(tensor, stored(resumed)[name]) for name, tensor in stored(whole).items())


def test_the_plan_says_bytes_on_disk_before_and_after(place, monkeypatch, capsys, caplog):
    monkeypatch.chdir(place)
    line = (
        "compress tiny.gguf -o small --calibration text.txt --num-samples 4 --max-length 32 "
        "--rank-multiple 2 --device cpu"
    )
    monkeypatch.setattr(sys, "argv", ["rankfold", *line.split()])
    with caplog.at_level(logging.INFO, "rankfold"), pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code in (0, None), err
    assert "tiny.gguf is de-quantised; its weights are written in bfloat16" in caplog.text
    plan = json.loads((place / "small" / "rankfold.json").read_text())["plan"]
    before, after = (place / "tiny.gguf").stat().st_size, sum(t.nbytes for t in stored(place / "small").values())
    assert (plan["source_bytes"], plan["bytes_after"]) == (before, after)
    row = next(row for row in err.splitlines() if "MiB on disk" in row)
    assert all(f"{number / 2**20:.1f}" in row for number in (before, after)) and f"{after / before - 1:+.1%}" in row


def test_bytes_on_disk_of_a_folder_and_of_a_model_in_memory(place):
    folder = rankfold.open_model(place / "model", device="cpu")
    plan = rankfold.plan(folder, method=METHOD)
    # Both columns of the plan count without headers of files, or a model would shrink by its header alone.
    written = sum(t.nbytes for t in stored(place / "model").values())
    assert plan.source_bytes == folder.bytes_on_disk == plan.bytes == written
    assert rankfold.plan(rankfold.open_model(folder.whole_model(), device="cpu"), method=METHOD).source_bytes is None


def test_a_file_that_does_not_fit_is_read_tensor_by_tensor(place, tmp_path, monkeypatch):
    """And everything is as if it had been read as a whole."""
    file = place / "tiny.gguf"
    sources = [rankfold.open_model(file, device="cpu")]
    monkeypatch.setattr(opening, "has_room", lambda size: False)
    sources.append(rankfold.open_model(file, device="cpu"))
    whole, streamed = sources
    assert not whole.streamed and streamed.streamed
    assert all(parameter.is_meta for parameter in streamed.blocks.parameters())
    assert streamed.fingerprint == whole.fingerprint and streamed.bytes_on_disk == whole.bytes_on_disk
    folders = [
        rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / name).output
        for source, name in zip(sources, ("whole", "streamed"), strict=True)
    ]
    assert {path.name for path in folders[0].iterdir()} == {path.name for path in folders[1].iterdir()}
    for path in folders[0].iterdir():
        if path.name not in ("rankfold.json", "README.md"):  # which have times, and the name of the folder
            assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
    ids = some_ids()
    assert torch.equal(streamed.whole_model()(ids).logits, whole.whole_model()(ids).logits)


def test_a_file_is_parsed_once_to_be_opened(place, monkeypatch):
    gguf = pytest.importorskip("gguf")
    read, named = [], []

    class Counted(gguf.GGUFReader):
        def __init__(self, path, mode="r"):
            read.append(self)
            super().__init__(path, mode)

    def counted(arch, blocks, table=gguf.get_tensor_name_map):
        named.append(arch)
        return table(arch, blocks)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    source = rankfold.open_model(place / "tiny.gguf")
    assert len(read) == len(named) == 1
    assert source.tokenizer is not None
    assert [type(reader.data) for reader in read] == [np.ndarray] * 2  # slices of a memory map cost far more
    assert gguf.GGUFReader is Counted and gguf.get_tensor_name_map is counted
