"""How many matrix products a plan says a token gains, against those that a compressed model runs. CPU, no network."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rankfold
from families import opened, some_ids, tokens
from rankfold.modules import factors

PRODUCTS = {"addmm", "mm", "bmm", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def run(model) -> int:
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), Products() as products:
        model(some_ids(), use_cache=False)
    return products.count


@pytest.mark.parametrize(
    "method",
    [
        rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, latent_cache=False),
        rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, latent_cache=False, junction="symmetric"),
        rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, latent_cache=False, junction="lu"),
        rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, latent_cache=False, shared_qkv=True),
        rankfold.LatentLLM(sparsity=0.3, sparse=0.1, rank_multiple=2),
        rankfold.make_method("modegpt", sparsity=0.3),
    ],
    ids=["identity", "symmetric", "lu", "shared", "sparse", "modegpt"],
)
def test_the_products_a_plan_adds_are_those_a_token_gains(method, monkeypatch):
    monkeypatch.setattr(factors, "TRIANGLE", 1024)  # one product for each triangle
    source = opened("llama")
    dense, plan = run(source.whole_model()), rankfold.plan(source, method=method)
    assert (
        run(rankfold.compress(opened("llama"), method=method, calibration=tokens(16)).model) - dense
        == plan.added_products
    )
    assert (plan.summary().caption is not None) == (plan.added_products > 0)
