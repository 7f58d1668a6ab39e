"""Gradients block by block, against autograd through the whole stock model."""

import weakref

import pytest
import torch

import rankfold
from activations import blocks_of
from families import KINDS, opened, some_ids, tiny_model, tokens
from gradients import stock_gradients
from rankfold.calibration import backward, runner
from rankfold.calibration.backward import sweep, sweep_memory, windows_for
from rankfold.calibration.gradients import KINDS as MEASURED
from rankfold.calibration.gradients import OutputGradient, gradient_observers, numbers, widest
from rankfold.calibration.moments import Moment
from rankfold.compression import importance
from rankfold.errors import NumericsError

IDS = some_ids(5, 24)


def layers(source, index: int) -> dict[str, str]:
    """Name -> path in the block of its linear layers; those of a mixture of experts have no MLP to look at."""
    view = source.meta_block(index)
    paths = {module: name for name, module in view.module.named_modules()}
    return {name: paths[module] for name, module in view.layers.items()}


def every(source) -> set[str]:
    """All that can be measured in a block of this model."""
    return {f"{layer}_{kind}" for layer in layers(source, 0) for kind in MEASURED}


def weight_gradients(family: str) -> list[dict[tuple[int, str], torch.Tensor]]:
    """Of the loss of every sequence alone: (block, layer) -> gradient of the weight ``(out, in)``, fp64."""
    source, found = opened(family), []
    for row in IDS:
        model = tiny_model(family)
        stock_gradients(model, row[None], {})
        found.append({})
        for index, block in enumerate(blocks_of(model)):
            for name, path in layers(source, index).items():
                layer = block.get_submodule(path)
                gradient = layer.weight.grad if isinstance(layer, torch.nn.Linear) else layer.weight.grad.T
                found[-1][index, name] = gradient.double()
    return found


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_whole_stock_model(family, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)  # three batches, the last one smaller
    monkeypatch.setattr(backward, "POSITIONS", 10)  # and three pieces of the logits
    source = opened(family)
    paths = {index: layers(source, index) for index in range(3)}
    wanted, alone = stock_gradients(tiny_model(family), IDS, paths), weight_gradients(family)
    found = dict(sweep(source, IDS, gradient_observers(every(source))))
    assert list(found) == [2, 1, 0] and all(moments.keys() == every(source) for moments in found.values())
    for (index, name), g in wanted.items():
        moment = found[index][f"{name}_gradient"]
        assert moment.count == IDS.numel()
        torch.testing.assert_close(moment.second_moment(), g.T @ g / len(g), rtol=1e-3, atol=1e-4 * g.square().mean())
        for sums in (moment, found[index][f"{name}_bias_gradient"]):
            torch.testing.assert_close(sums.total.double(), g.sum(0), rtol=1e-3, atol=1e-4 * g.abs().max())
        gradients = torch.stack([one[index, name] for one in alone])  # (sequences, out, in)
        for kind, expected in (("weight_gradient", gradients.sum(0)), ("fisher", gradients.square().sum(0))):
            moment = found[index][f"{name}_{kind}"]
            assert moment.count == len(IDS)
            torch.testing.assert_close(moment.total, expected, rtol=1e-3, atol=1e-5 * expected.abs().max())


def test_observers_see_what_a_gradient_of_weights_is_made_of():
    """``dL/dW = sum g x^T``, in the layers of an observer of one's own."""

    class WeightGradient:
        def __init__(self, layer):
            self.layer, self.sum = layer, 0.0

        def add(self, x, g):
            self.sum = self.sum + g.flatten(0, -2).T @ x.flatten(0, -2)

        def finish(self):
            return Moment(1, self.sum, None, None)

    model, source = tiny_model("llama"), opened("llama")
    stock_gradients(model, IDS, {})
    paths = {"q": "self_attn.q_proj", "up": "mlp.up_proj"}
    found = dict(
        sweep(source, IDS, lambda view: {n: WeightGradient(view.module.get_submodule(p)) for n, p in paths.items()})
    )
    for index, block in enumerate(blocks_of(model)):
        for name, path in paths.items():
            wanted = block.get_submodule(path).weight.grad
            torch.testing.assert_close(found[index][name].total, wanted, rtol=1e-3, atol=1e-5)


def test_under_autocast_gradients_are_as_exact_as_its_numbers():
    plain, rough = opened("llama"), opened("llama")
    rough.autocast = torch.bfloat16
    exact, found = (dict(sweep(source, IDS, gradient_observers(every(plain)))) for source in (plain, rough))
    for index, moments in exact.items():
        for name, moment in moments.items():
            if name.endswith("bias_gradient"):  # that of keys is rounding: a constant changes no attention
                continue
            a, b = (m.total if m.second is None else m.second for m in (moment, found[index][name]))
            assert 0 < (a - b).norm() / a.norm() < 0.05, (index, name)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_model_in_bf16_gives_finite_gradients_near_those_in_fp32(family):
    plain, rough = opened(family), rankfold.open_model(tiny_model(family).to(torch.bfloat16), device="cpu")
    exact, found = (dict(sweep(source, IDS, gradient_observers(every(plain)))) for source in (plain, rough))
    for index, moments in exact.items():
        for name, moment in moments.items():
            if name.endswith("bias_gradient"):  # that of keys is rounding: a constant changes no attention
                continue
            a, b = (m.total if m.second is None else m.second for m in (moment, found[index][name]))
            assert 0 < (a - b).norm() / a.norm() < 0.2, (index, name)  # queries and keys of small gradients differ most


def test_a_sweep_ends_at_the_block_it_is_told_and_leaves_the_model_as_it_was():
    source = opened("gpt_neox")
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    wanted = [p.requires_grad for p in source.model.parameters()]
    whole = dict(sweep(source, IDS, gradient_observers({"down_gradient"})))
    some = dict(sweep(source, IDS, gradient_observers({"down_gradient"}), first=1))
    assert list(some) == [2, 1]
    for index, moments in some.items():
        assert torch.equal(moments["down_gradient"].second, whole[index]["down_gradient"].second)
    assert wanted == [p.requires_grad for p in source.model.parameters()]
    assert all(p.grad is None for p in source.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.model.state_dict().items())


def test_one_block_has_a_graph_at_a_time(monkeypatch):
    """The graph of a block is gone before the next block is read."""
    source, seen = opened("llama"), []
    block = source.block

    def read(index):
        assert not [view for view in seen if view() is not None]
        view = block(index)
        seen.append(weakref.ref(view.module))
        return view

    monkeypatch.setattr(source, "block", read)
    for _ in sweep(source, IDS, gradient_observers(every(source))):
        pass
    assert len(seen) == 6


def test_gradients_that_are_not_finite_are_named():
    source = opened("llama")

    class Broken(OutputGradient):
        def add(self, x, g):
            super().add(x, g * torch.inf)

    with pytest.raises(NumericsError, match=r"gradients of model.layers.2 \(down_gradient\) are NaN or infinite"):
        dict(sweep(source, IDS, lambda view: {"down_gradient": Broken(view.module.mlp.down_proj)}))


def test_as_many_windows_as_a_moment_of_full_rank_needs():
    found = [windows_for(*shape) for shape in ((100, 1024, 64), (100, 1024, 4096), (3, 1024, 64), (100, 1000, 64))]
    assert found == [8, 16, 3, 9]


def test_weights_stay_what_their_owner_made_them():
    model = tiny_model("llama").requires_grad_()
    frozen = model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    source = rankfold.open_model(model)
    for _ in sweep(source, IDS, gradient_observers(every(source))):
        pass
    assert [p.shape for p in model.parameters() if not p.requires_grad] == [frozen.shape]
    assert all(p.grad is None for p in model.parameters())


def test_the_memory_foreseen_grows_by_what_enters_every_block_and_one_gradient():
    source, tokens, numbers = opened("llama"), 2**20, 32 * (3 + 1)  # fp32 all of them
    assert sweep_memory(source, 2 * tokens) - sweep_memory(source, tokens) == tokens * 4 * numbers
    assert sweep_memory(source, tokens) > tokens * 4 * numbers  # and the graph of one batch


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "falcon-gqa", "mixtral"])
def test_numbers_and_widths_are_those_that_are_measured(family):
    source = opened(family)
    names, view = every(source), source.meta_block(0)
    measured = dict(sweep(source, IDS, gradient_observers(names), first=2))[2]
    sizes = {name: (m.total if m.second is None else m.second).shape for name, m in measured.items()}
    assert numbers(view, names) == sum(size.numel() for size in sizes.values())
    assert widest(view, names) == max(size[0] for size in sizes.values())


def test_merging_windows_adds_what_each_gives():
    source = opened("opt")
    whole, *parts = (
        dict(sweep(source, ids, gradient_observers({"up_fisher", "up_weight_gradient"})))
        for ids in (IDS, IDS[:2], IDS[2:])
    )
    for name, moment in whole[1].items():
        torch.testing.assert_close(moment.total, sum(part[1][name].total for part in parts), rtol=1e-3, atol=1e-6)
        assert moment.count == sum(part[1][name].count for part in parts)


def test_the_gradients_of_one_block_are_held_at_a_time(monkeypatch):
    """Those of a wide block are larger than the block."""
    held, plain = [], importance.sweep

    def watched(*given):
        for index, moments in plain(*given):
            assert not any(reference() for reference in held)
            held.extend(weakref.ref(moment) for moment in moments.values())
            yield index, moments
            del moments

    monkeypatch.setattr(importance, "sweep", watched)
    importance.gradients_of(opened("llama"), rankfold.make_method("kobd"), tokens())
    assert len(held) > 10
