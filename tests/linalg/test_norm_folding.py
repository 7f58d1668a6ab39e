"""A LayerNorm between a writer and a reader, against torch's own, in fp64."""

import pytest
import torch
from torch import nn

from rankfold.linalg.norm_folding import centre_columns, fold_norm

D, F, O, T = 12, 7, 5, 30


@pytest.fixture
def layers():
    torch.manual_seed(0)
    norm = nn.LayerNorm(D, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return nn.Linear(F, D, dtype=torch.float64), norm, nn.Linear(D, O, dtype=torch.float64)


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_norm_is_an_rms_norm_between_folded_layers_in_any_coordinates(layers, bias):
    writer, norm, reader = layers
    if not bias:
        writer.bias = reader.bias = None
    x, Q = torch.randn(T, F, dtype=torch.float64), torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    W, b = fold_norm(reader.weight, reader.bias, norm.weight, norm.bias)
    stream = x @ centre_columns(writer.weight).T
    if bias:
        stream = stream + centre_columns(writer.bias)
    torch.testing.assert_close(rms(stream @ Q) @ (W @ Q).T + b, reader(norm(writer(x))), rtol=1e-10, atol=1e-10)


def test_what_is_not_there_stays_away(layers):
    _, norm, reader = layers
    assert fold_norm(reader.weight, None, norm.weight, None)[1] is None
    W, b = fold_norm(reader.weight, reader.bias, None, None)
    assert torch.equal(W, reader.weight) and torch.equal(b, reader.bias)
    assert torch.equal(fold_norm(reader.weight, None, None, norm.bias)[1], reader.weight @ norm.bias)
