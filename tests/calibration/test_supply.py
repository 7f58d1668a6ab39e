"""What the next block is fitted to: the dense stream of one pass, or what the compressed blocks before it send."""

import pytest
import torch

from families import opened, some_ids
from rankfold.calibration.runner import advance, measure, start
from rankfold.calibration.supply import FromStream

STATISTICS = {"mlp_hidden"}


def moved(source, *views):
    stream = start(source, some_ids(), autocast=None)
    for view in views:
        advance(view, stream)
    return stream


def halved(source):
    """The first block, compressed so to say."""
    view = source.block(0)
    view.module.mlp.down_proj.weight.data.div_(2)
    return view


@pytest.mark.parametrize("taken", [True, False], ids=["measured", "of an earlier run"])
@pytest.mark.parametrize("sequential", [True, False])
def test_the_stream_goes_through_compressed_blocks_or_through_dense_ones(sequential, taken):
    source = opened("llama")
    supply, dense = FromStream(moved(source), sequential=sequential), moved(source, source.block(0))
    if taken:
        supply.take(source.block(0), STATISTICS)
    else:
        supply.skip(source.block(0))
    view = halved(source)
    supply.follow(view)
    expected = moved(source, view) if sequential else dense
    torch.testing.assert_close(supply.stream.hidden, expected.hidden)
    assert not torch.allclose(moved(source, view).hidden[0], dense.hidden[0])


@pytest.mark.parametrize("sequential", [True, False])
def test_one_pass_gives_moments_as_a_store_would(sequential):
    source = opened("llama")
    plain = measure(source.block(0), moved(source), STATISTICS, step=False)["mlp_hidden"]
    ours = FromStream(moved(source), sequential=sequential).take(source.block(0), STATISTICS)["mlp_hidden"]
    expected = plain if sequential else plain.rounded()
    assert torch.equal(ours.second, expected.second) and ours.second.dtype == expected.second.dtype
    assert plain.second.dtype != plain.rounded().second.dtype
