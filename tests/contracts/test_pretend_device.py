"""Everything runs on an accelerator: nothing forgets where its tensors are, and what comes out is what a CPU gives.

The device is pretended (``pretend_device.py``). Methods that read gradients are left out: it has no backward pass.
"""

import pytest
import torch

import rankfold
from families import ANY_MODEL, some_ids, tiny_model, tokens
from interrupted import assert_ends_in_the_same_bytes
from pretend_device import CUDA, Pretend, pretend_device, waits
from rankfold import CompressionResult, make_method
from rankfold.compression.output import MemoryWriter
from rankfold.evaluation.speed import speed
from rankfold.linalg import elimination
from rankfold.methods import method_class
from rankfold.models import dense_model
from rankfold.models.dense_model import DenseModel
from saved import save_gguf, save_tiny
from tiny_encoders import ENCODERS, batch_of, samples_of, tiny_encoder

BACKWARD = {"fwsvd", "kobd", "llm-pruner", "llm-surgeon", "obd", "pruner-zero", "zs-svd"}
RUNS = [(name, mode) for name in ANY_MODEL if name not in BACKWARD for mode in method_class(name).modes]
FAMILIES = ["opt", "gpt2", "gpt_neox", "falcon-gqa", "qwen3", "gemma3", "mixtral", "bert-head"]
CLOSE = 1e-5  # of the norm of what a model computes
LESS_CLOSE = {"aa-svd": 1e-4}  # each of its layers makes up for the rounding of those before it


@pytest.fixture
def device():
    with pretend_device():
        yield


def method_of(name: str, **options):
    rounded = {"rank_multiple": 2} if hasattr(method_class(name), "rank_multiple") else {}
    return make_method(name, **rounded | options)


def opened(family: str, device: str) -> DenseModel:
    """A model that is in memory on the CPU, its blocks run in fp32."""
    encoder = family in ENCODERS
    model = tiny_encoder(family) if encoder else tiny_model(family, blocks=2)
    source = rankfold.open_model(model, device=device, component=ENCODERS[family].part if encoder else None)
    source.autocast = None
    return source


def compressed(family: str, device: str, method: str, mode: str) -> CompressionResult:
    source = opened(family, device)
    data = samples_of(source) if family in ENCODERS else tokens()
    return rankfold.compress(source, method=method_of(method), calibration=data, mode=mode)


@torch.no_grad()
def computed(source: DenseModel, family: str, model) -> torch.Tensor:
    """What a model computes, on the CPU."""
    batch = batch_of(source) if family in ENCODERS else some_ids()
    return model(batch.to(model.device)).logits.to("cpu")


def assert_runs_as_on_a_cpu(family: str, method: str, mode: str) -> None:
    here, source = compressed(family, "cpu", method, mode), opened(family, "cpu")
    with pretend_device():
        there = compressed(family, "cuda", method, mode)
        assert there.model.device == CUDA
        got = computed(source, family, there.model)
    ranks = [[m.rank for m in result.plan.modules] for result in (here, there)]
    assert ranks[0] == ranks[1]
    expected = computed(source, family, here.model)
    assert (got - expected).norm() < LESS_CLOSE.get(method, CLOSE) * expected.norm()


@pytest.mark.parametrize("method, mode", RUNS)
def test_every_method_runs_on_an_accelerator(method, mode):
    assert_runs_as_on_a_cpu("llama", method, mode)


@pytest.mark.parametrize("method", ["rankfold", "latentllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_family_runs_on_an_accelerator(family, method):
    assert_runs_as_on_a_cpu(family, method, "sequential")


def test_mixed_devices_raise(device):
    there = torch.ones(2, device="cuda")
    assert (there + there.clone()).tolist() == [2, 2] and there.device == CUDA
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cpu! \(aten::add"):
        there + torch.ones(2)
    assert sum(waits.values()) == 1


def test_a_folder_is_streamed_resumed_loaded_and_evaluated(device, tmp_path, monkeypatch):
    """What is read ahead waits on the host; a run that was stopped goes on from what is on the disk."""
    save_tiny(tmp_path / "model", blocks=3)
    ids = tokens(8)

    def compress(folder):
        source = rankfold.open_model(tmp_path / "model", device="cuda")
        assert source.overlaps and not source.is_resident
        return rankfold.compress(source, method=method_of("latentllm"), calibration=ids, output=folder)

    read, places = DenseModel.moved, []

    def noting(self, index, module):
        places.append({tensor.device.type for tensor in module.state_dict().values()})
        return read(self, index, module)

    monkeypatch.setattr(DenseModel, "moved", noting)
    assert_ends_in_the_same_bytes(compress, tmp_path, monkeypatch)
    assert places and all(kinds == {"cpu"} for kinds in places)
    model = rankfold.load(tmp_path / "parts", device="cuda")
    whole = rankfold.perplexity(model, some_ids())
    streamed = rankfold.perplexity(tmp_path / "parts", some_ids(), device="cuda", stream=True)
    assert abs(streamed["nll"] - whole["nll"]) < CLOSE * whole["nll"] and streamed["peak_device_memory_bytes"] == 0
    assert speed({"small": model}, batch=2, prompt=8, steps=2, repeats=1)["models"]


def test_moments_of_a_folder_and_of_memory_go_to_the_device(device, tmp_path):
    source = opened("llama", "cuda")
    in_memory, in_folder = (rankfold.calibrate(source, tokens(), place) for place in (None, tmp_path / "moments"))
    kept = [
        part for moment in in_memory[1].values() for part in vars(moment).values() if isinstance(part, torch.Tensor)
    ]
    assert kept and {part.device.type for part in kept} == {"cpu"}
    results = [
        rankfold.compress(source, method=method_of("modegpt"), moments=moments) for moments in (in_memory, in_folder)
    ]
    first, second = (result.model.state_dict() for result in results)
    assert all(torch.equal(first[name], second[name]) for name in first)
    planned = rankfold.plan(source, method=method_of("modegpt"), moments=in_folder)
    assert all(module.relative_error is not None for module in planned.modules)


def test_hidden_states_wait_in_host_memory_and_come_back_as_they_were(device, tmp_path):
    """One batch of a stream is on the device, whether the others are in memory or in a file."""
    results = []
    for place in (None, "cpu", tmp_path):
        source = rankfold.open_model(tiny_model("llama", blocks=2).to("cuda"), offload=place)
        source.autocast = None
        results.append(rankfold.compress(source, method=method_of("rankfold"), calibration=tokens(96)))
    assert [result.record["run"]["offload"] for result in results] == [None, "cpu", "disk"]
    expected, *states = (result.model.to("cpu").state_dict() for result in results)
    assert all(torch.equal(some[name], expected[name]) for some in states for name in expected)
    kept = source.offload.states()
    kept.append(torch.ones(1, 2, 3, device="cuda"))
    assert kept[0].device == CUDA and kept._fetch(0).device.type == "cpu"


def test_what_does_not_fit_into_host_memory_is_not_read_ahead(device, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(dense_model, "has_room", lambda size: asked.append(size))
    source = rankfold.open_model(save_tiny(tmp_path / "model", blocks=2), device="cuda")
    block = sum(tensor.nbytes for tensor in source.block(1).module.parameters())
    assert not source.overlaps and asked == [2 * block]


def test_the_record_names_the_accelerator_and_its_memory(device):
    runs = {}
    for where in ("cpu", "cuda"):
        result = rankfold.compress(opened("llama", where), method=method_of("strided"), calibration=tokens(8))
        runs[where] = [result.record["run"][key] for key in ("device", "accelerator", "peak_device_memory_bytes")]
    assert runs == {"cpu": ["cpu", None, None], "cuda": ["cuda", "a pretend device", 0]}


def test_a_model_in_memory_stays_where_it_is(device):
    """Its blocks come to the device one by one, wherever they are."""
    for given, asked, expected in (("cpu", "cuda", "cuda"), ("cuda", "cpu", "cpu"), ("cuda", "auto", "cuda")):
        model = tiny_model("llama", blocks=2).to(given)
        source = rankfold.open_model(model, device=asked)
        source.autocast = None
        assert source.device.type == expected and source.is_resident == (given == expected)
        result = rankfold.compress(source, method=method_of("modegpt"), calibration=tokens())
        assert {tensor.device.type for tensor in result.model.state_dict().values()} == {expected}
        assert {tensor.device.type for tensor in model.state_dict().values()} == {given}
        assert source.whole_model().device.type == expected


def test_blocks_of_a_gguf_file_stay_on_the_host(device, tmp_path):
    source = rankfold.open_model(save_gguf(save_tiny(tmp_path / "model"), tmp_path / "model.gguf"), device="cuda")
    assert {tensor.device.type for tensor in source.blocks.state_dict().values()} == {"cpu"}
    assert source.model.get_input_embeddings().weight.device == CUDA and source.overlaps
    result = rankfold.compress(source, method=method_of("modegpt"), calibration=tokens())
    assert result.model.device == CUDA
    assert isinstance(source.whole_model().model.layers[0].mlp.up_proj.weight.data, Pretend)


def test_no_batch_makes_the_host_wait_for_the_device(device):
    """The model may look at its masks while it embeds a batch; nothing else waits more often for more batches."""
    counts = []
    for rows in (128, 256):  # two batches, of which it is found out whether blocks are called alike, and four
        waits.clear()
        rankfold.calibrate(opened("llama", "cuda"), tokens(rows))
        counts.append(waits.copy())
    more = counts[1] - counts[0]
    assert counts[0] and {line.partition(":")[0] for line in more} <= {"calibration/forward.py"}


def test_the_host_waits_once_for_a_block_that_is_read_and_once_for_a_group_of_units(device, monkeypatch):
    groups, one_by_one = [], elimination._one_by_one
    monkeypatch.setattr(elimination, "_one_by_one", lambda *given: (groups.append(1), one_by_one(*given))[1])
    generator = torch.Generator().manual_seed(0)
    W, x = (torch.randn(rows, 300, dtype=torch.float64, generator=generator) for rows in (32, 600))
    W, P = W.to("cuda"), torch.linalg.inv(x.T @ x).to("cuda")
    source = opened("llama", "cuda")
    waits.clear()
    elimination.elimination(W, P, rank=150)
    assert max(waits.values()) == len(groups) > 10
    assert sum(waits.values()) < len(groups) + 10  # the units that remain are moved together now and then
    waits.clear()
    source.block(1)
    assert sum(waits.values()) == 1


def test_compressed_blocks_wait_in_host_memory(device, monkeypatch):
    """A device would fill with what is done."""
    places, finish = [], MemoryWriter.finish

    def noting(self, *given):
        places.extend(tensor.device.type for tensor in self.state.values())
        return finish(self, *given)

    monkeypatch.setattr(MemoryWriter, "finish", noting)
    assert compressed("llama", "cuda", "modegpt", "sequential").model.device == CUDA
    assert len(places) > 10 and set(places) == {"cpu"}
