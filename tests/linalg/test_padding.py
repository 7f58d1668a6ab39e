"""Narrow heads in wide ones: scores against a rotation written out, places against a loop."""

import math

import pytest
import torch

from rankfold.linalg.padding import head_places, pad_units, scatter_heads
from rankfold.linalg.rotations import rope_rotations


def turned(x, angles):
    """One vector, pair by pair: dimension p with p + P, by the angle of the pair."""
    half, out = len(angles), x.clone()
    for p, angle in enumerate(angles.tolist()):
        c, s = math.cos(angle), math.sin(angle)
        out[p], out[p + half] = c * x[p] - s * x[p + half], c * x[p + half] + s * x[p]
    return out


@pytest.mark.parametrize("rotary_dim", [12, 8])
def test_scattered_queries_and_keys_have_the_scores_of_the_narrow_ones(rotary_dim):
    """At every distance; with partial rotation pairs that do not turn sit after those that do."""
    torch.manual_seed(0)
    N, H, half = 12, 3, rotary_dim // 2
    still = [half] * ((N - rotary_dim) // 2)
    pairs = torch.tensor([[3, 0, *still], [1, 2, *still], [*still, 2, 3]])
    frequencies = torch.rand(half).double()
    q, k = torch.randn(2, H, pairs.shape[1] * 2).double()
    places = head_places(pairs, rotary_dim)
    wide = [scatter_heads(x.flatten(), places, N).view(H, N) for x in (q, k)]
    rotations = rope_rotations(frequencies, N, window=4)  # q at m, k at n: distances n - m from -4 to 0
    with_still = torch.cat([frequencies, torch.zeros(1)])
    for i, distance in enumerate(range(-4, 1)):
        for h in range(H):
            angles = with_still[pairs[h]] * distance
            expected = q[h] @ turned(k[h], angles)
            assert (wide[0][h] @ rotations[i] @ wide[1][h]).item() == pytest.approx(expected.item(), abs=1e-9)


def test_places_are_those_of_a_loop():
    places = head_places(torch.tensor([[4, 0, 4], [2, 4, 1]], dtype=torch.int32), 8)
    assert places.tolist() == [[8, 0, 10, 9, 4, 11], [2, 8, 1, 6, 9, 5]]


def test_frequencies_out_of_range_or_twice_are_refused():
    with pytest.raises(ValueError, match=r"in 0 to 4, got 1 to 5"):
        head_places(torch.tensor([[1, 5]]), 8)
    with pytest.raises(ValueError, match="twice"):
        head_places(torch.tensor([[0, 1], [1, 1]]), 8)


def test_scattering_matrices_is_scattering_their_columns():
    torch.manual_seed(0)
    x, places = torch.randn(2 * 3, 5), torch.tensor([[1, 4, 0], [2, 3, 6]])
    wide = scatter_heads(x, places, 7)
    assert wide.shape == (14, 5) and wide.abs().sum(1).count_nonzero() == 6
    for h in range(2):
        for i in range(3):
            assert torch.equal(wide[7 * h + places[h, i]], x[3 * h + i])
    assert torch.equal(scatter_heads(x[:, 2], places, 7), wide[:, 2])


@pytest.mark.parametrize("dim", [0, 1])
def test_units_are_padded_behind(dim):
    x = torch.ones(2, 3)
    padded = pad_units(x, 5, dim)
    assert padded.shape == ((5, 3) if dim == 0 else (2, 5)) and padded.sum() == 6
    assert torch.equal(padded[:2, :3], x) and torch.equal(pad_units(x[0], 4), torch.tensor([1.0, 1.0, 1.0, 0.0]))
