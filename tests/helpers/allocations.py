"""How much memory something takes at its peak, counted by PyTorch's allocator: no library's buffers are in it."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run) -> int:
    """Return by how much the tensors that there are grow at most while ``run()`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
