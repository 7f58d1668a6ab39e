"""What compressing experts costs a mixture that has learnt something, on text it has not seen.

It costs more when their moments are told wrong. Bounds are about twice what was measured, as in test_quality.py.
"""

import os

import pytest
import torch

import rankfold
from rankfold import MoDeGPT, Rankfold
from rankfold.calibration import experts
from rankfold.calibration.experts import ROUTING
from rankfold.calibration.moments import Moment
from trained import calibration, held_out_windows, trained, unigram_perplexity, with_held_out

METHOD, MORE = (MoDeGPT(modules={"experts": sparsity}) for sparsity in (0.66, 0.75))


def perplexity(model) -> float:
    return rankfold.perplexity(model, held_out_windows()[:128])["perplexity"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    found = rankfold.open_model(trained("mixtral", shared), device="cpu")
    found.autocast = None
    return found


@pytest.fixture(scope="module")
def dense(source) -> float:
    return perplexity(source.model)


@pytest.fixture(scope="module")
def moments(source):
    return rankfold.calibrate(source, calibration())


def changed(moments, source, change):
    """The same moments with other weights of the router."""
    store = rankfold.MomentStore(moments.identity)
    for index in range(len(source)):
        block = dict(moments[index])
        store[index] = block | {ROUTING: Moment(block[ROUTING].count, None, None, None, change(block[ROUTING].rows))}
    return store


def ratio(source, dense: float, moments) -> float:
    return perplexity(rankfold.compress(source, method=METHOD, moments=moments).model) / dense


def test_the_mixture_has_learnt_something_and_leaves_some_experts_to_few_tokens(source, dense, moments):
    assert dense < unigram_perplexity() / 2
    tokens = torch.stack([(moments[index][ROUTING].rows > 0).sum(0) for index in range(len(source))])
    assert tokens.min() < 192 < tokens.max()  # four for each of 48 units


def test_true_moments_are_better_than_wrong_ones(source, dense, moments, monkeypatch):
    """Each expert's own tokens, weighted; all tokens for all; and no moments at all."""
    own = ratio(source, dense, moments)
    pooled = ratio(source, dense, changed(moments, source, torch.ones_like))
    measured = experts._summed

    def identity(*args):
        found = measured(*args)
        return Moment(found.count, found.total, None, torch.eye(len(found.total), dtype=torch.float64))

    monkeypatch.setattr(experts, "_summed", identity)
    blind = ratio(source, dense, moments)
    assert own < 1.08
    assert own < pooled < blind and blind - 1 > 3 * (own - 1)


@torch.no_grad()
def first_sum_of_experts(model) -> torch.Tensor:
    """What the experts of the first block add up to, weighted by the router."""
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: seen.append(out))
    model(calibration().ids)
    handle.remove()
    return seen[0]


def test_the_routers_weights_count(source, moments):
    """For what is fitted; the perplexity of the little that was learnt may go either way."""
    wanted = first_sum_of_experts(source.model)
    stores = (moments, changed(moments, source, lambda rows: (rows > 0).float()))
    models = (rankfold.compress(source, method=MORE, moments=store).model for store in stores)
    own, unweighted = ((first_sum_of_experts(model) - wanted).pow(2).mean() for model in models)
    assert own < 0.97 * unweighted


def test_the_default_method_costs_little(source, dense):
    model = rankfold.compress(source, method=Rankfold(sparsity=0.3), calibration=with_held_out(calibration())).model
    assert perplexity(model) / dense < 1.02
