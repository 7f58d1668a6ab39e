"""Gradients block by block, against autograd through the whole stock model."""

import weakref

import pytest
import torch

import rankfold
from activations import blocks_of
from families import KINDS, opened, some_ids, tiny_model
from gradients import stock_gradients
from rankfold.calibration import backward, runner
from rankfold.calibration.backward import (
    GRADIENTS,
    OutputGradient,
    gradient_observers,
    sweep,
    sweep_memory,
    windows_for,
)
from rankfold.errors import NumericsError

IDS = some_ids(5, 24)


def layers(source, index: int) -> dict[str, str]:
    """Statistic -> path of its layer in the block; those of a mixture of experts have no MLP to look at."""
    view = source.meta_block(index)
    paths = {module: name for name, module in view.module.named_modules()}
    found = {"attention_gradient": paths[view.attention.output_module]}
    return found | ({"mlp_gradient": view.mlp.spec.down} if view.mlp else {})


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_whole_stock_model(family, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)  # three batches, the last one smaller
    monkeypatch.setattr(backward, "POSITIONS", 10)  # and three pieces of the logits
    source = opened(family)
    paths = {index: layers(source, index) for index in range(3)}
    wanted = stock_gradients(tiny_model(family), IDS, paths)
    found = dict(sweep(source, IDS, gradient_observers(set(paths[0]))))
    assert list(found) == [2, 1, 0] and {(i, name) for i, moments in found.items() for name in moments} == set(wanted)
    for (index, name), g in wanted.items():
        moment = found[index][name]
        assert moment.count == IDS.numel()
        torch.testing.assert_close(moment.second_moment(), g.T @ g / len(g), rtol=1e-3, atol=1e-4 * g.square().mean())
        torch.testing.assert_close(moment.total, g.sum(0), rtol=1e-3, atol=1e-4 * g.abs().max())


def test_observers_see_what_a_gradient_of_weights_is_made_of():
    """``dL/dW = sum g x^T``, in the layers of an observer of one's own."""

    class WeightGradient:
        def __init__(self, layer):
            self.layer, self.sum = layer, 0.0

        def add(self, x, g):
            self.sum = self.sum + g.flatten(0, -2).T @ x.flatten(0, -2)

        def finish(self):
            return backward.Moment(1, self.sum, None, None)

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
    exact, found = (dict(sweep(source, IDS, gradient_observers(set(GRADIENTS)))) for source in (plain, rough))
    for index, moments in exact.items():
        for name, moment in moments.items():
            a, b = moment.second_moment(), found[index][name].second_moment()
            assert 0 < (a - b).norm() / a.norm() < 0.05, (index, name)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_model_in_bf16_gives_finite_gradients_near_those_in_fp32(family):
    plain, rough = opened(family), rankfold.open_model(tiny_model(family).to(torch.bfloat16), device="cpu")
    exact, found = (dict(sweep(source, IDS, gradient_observers(set(GRADIENTS)))) for source in (plain, rough))
    for index, moments in exact.items():
        for name, moment in moments.items():
            a, b = moment.second_moment(), found[index][name].second_moment()
            assert 0 < (a - b).norm() / a.norm() < 0.1, (index, name)


def test_a_sweep_ends_at_the_block_it_is_told_and_leaves_the_model_as_it_was():
    source = opened("gpt_neox")
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    wanted = [p.requires_grad for p in source.model.parameters()]
    whole = dict(sweep(source, IDS, gradient_observers({"mlp_gradient"})))
    some = dict(sweep(source, IDS, gradient_observers({"mlp_gradient"}), first=1))
    assert list(some) == [2, 1]
    for index, moments in some.items():
        assert torch.equal(moments["mlp_gradient"].second, whole[index]["mlp_gradient"].second)
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
    for _ in sweep(source, IDS, gradient_observers(set(GRADIENTS))):
        pass
    assert len(seen) == 6


def test_gradients_that_are_not_finite_are_named():
    source = opened("llama")

    class Broken(OutputGradient):
        def add(self, x, g):
            super().add(x, g * torch.inf)

    with pytest.raises(NumericsError, match=r"gradients of model.layers.2 \(mlp_gradient\) are NaN or infinite"):
        dict(sweep(source, IDS, lambda view: {"mlp_gradient": Broken(view.module.mlp.down_proj)}))


def test_as_many_windows_as_a_moment_of_full_rank_needs():
    found = [windows_for(*shape) for shape in ((100, 1024, 64), (100, 1024, 4096), (3, 1024, 64), (100, 1000, 64))]
    assert found == [8, 16, 3, 9]


def test_weights_stay_what_their_owner_made_them():
    model = tiny_model("llama").requires_grad_()
    frozen = model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    for _ in sweep(rankfold.open_model(model), IDS, gradient_observers(set(GRADIENTS))):
        pass
    assert [p.shape for p in model.parameters() if not p.requires_grad] == [frozen.shape]
    assert all(p.grad is None for p in model.parameters())


def test_the_memory_foreseen_grows_by_what_enters_every_block_and_one_gradient():
    source, tokens, numbers = opened("llama"), 2**20, 32 * (3 + 1)  # fp32 all of them
    assert sweep_memory(source, 2 * tokens) - sweep_memory(source, tokens) == tokens * 4 * numbers
    assert sweep_memory(source, tokens) > tokens * 4 * numbers  # and the graph of one batch
