"""What the next block is fitted to: the dense stream of one pass, or what the compressed blocks before it send."""

import pytest
import torch

from families import opened, some_ids
from rankfold.calibration.providers import DenseMoments, HiddenStates
from rankfold.calibration.runner import advance, measure, start

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


def supplied(source, *, sequential: bool):
    """What gives the moments, and its stream."""
    stream = moved(source)
    return (HiddenStates(stream) if sequential else DenseMoments(stream)), stream


@pytest.mark.parametrize("taken", [True, False], ids=["measured", "of an earlier run"])
@pytest.mark.parametrize("sequential", [True, False])
def test_the_stream_goes_through_compressed_blocks_or_through_dense_ones(sequential, taken):
    source = opened("llama")
    (provider, stream), dense = supplied(source, sequential=sequential), moved(source, source.block(0))
    provider.enter(source.block(0), skip=not taken)
    if taken:
        provider.measure(source.block(0), STATISTICS)
    view = halved(source)
    provider.follow(view)
    expected = moved(source, view) if sequential else dense
    torch.testing.assert_close(stream.hidden, expected.hidden)
    assert not torch.allclose(moved(source, view).hidden[0], dense.hidden[0])


@pytest.mark.parametrize("sequential", [True, False])
def test_one_pass_gives_moments_as_a_store_would(sequential):
    source = opened("llama")
    plain = measure(source.block(0), moved(source), STATISTICS, step=False)["mlp_hidden"]
    provider, _ = supplied(source, sequential=sequential)
    provider.enter(source.block(0), skip=False)
    ours = provider.measure(source.block(0), STATISTICS)["mlp_hidden"]
    expected = plain if sequential else plain.rounded()
    assert torch.equal(ours.second, expected.second) and ours.second.dtype == expected.second.dtype
    assert plain.second.dtype != plain.rounded().second.dtype


def test_two_streams_run_side_by_side():
    """The dense one through the dense block, the other through its substitute; measured before the latter moves."""
    source = opened("llama")
    small, dense = moved(source), moved(source)
    both = HiddenStates(small, dense)
    both.enter(source.block(0))
    before = moved(source)
    missing = both.measure(source.block(0), {"mlp_feedback"})["mlp_feedback"]
    block = source.block(0).module
    with torch.no_grad():
        args, kwargs, _ = before.calls[0][0]
        after, inside = [], []
        hook = block.mlp.register_forward_hook(lambda _, __, out: inside.append(out))
        for hidden in before.hidden:
            out = block(hidden, *args, **kwargs)
            after.append(out[0] if isinstance(out, tuple) else out)
        hook.remove()
    # Both streams are equal before the first block, so what is missing after attention is what the MLP sends.
    sent = torch.cat([x.flatten(0, -2) for x in inside])
    torch.testing.assert_close(missing.mean.float(), sent.mean(0), rtol=1e-4, atol=1e-6)
    assert missing.energy.item() / missing.count == pytest.approx(sent.square().sum(1).mean().item(), rel=1e-4)
    torch.testing.assert_close(dense.hidden, after)
    torch.testing.assert_close(small.hidden, before.hidden)
    view = halved(source)
    both.follow(view)
    torch.testing.assert_close(small.hidden, moved(source, view).hidden)
