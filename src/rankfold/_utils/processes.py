"""Several processes that share one run, as `torchrun` and `accelerate launch` start them.

Shards of the calibration set define the numbers; processes only share the shards (docs/many-gpus.md). Every exchange
begins with a round in which each process reports whether it has failed. So all processes raise the error of one, at the
exchange where they would have waited for it. In a single process every function here is the identity, and
torch.distributed is not imported.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import RankfoldError, first_line, option

if TYPE_CHECKING:
    import torch

LONGEST = timedelta(days=2)  # that one process waits for another: the first may train while the others wait
TOLD = "All processes of the run raise this."  # note on an error that needs no further exchange

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")
# `map`, or `dealt`, by which processes share its calls.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class _Group:
    index: int
    count: int
    device: "torch.device"  # whose memory the backend sends from


_group: _Group | None = None  # of this process; None where it works alone


def process_count() -> int:
    """Return how many processes share what runs now."""
    return _group.count if _group else 1


def process_index() -> int:
    """Return the number of this process, from 0."""
    return _group.index if _group else 0


def is_first() -> bool:
    """Tell whether this is the process that decomposes, writes and prints."""
    return process_index() == 0


def launched_count() -> int:
    """Return how many processes were launched together, also where this one works alone."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def exchange_device() -> "torch.device | None":
    """Return the device whose memory the processes exchange, the one of this process; ``None`` where it works alone."""
    return _group and _group.device


def own_shards(shards: int) -> range:
    """Return which of so many shards are this process's; contiguous, and in the order of the processes."""
    index, count = process_index(), process_count()
    return range(index * shards // count, (index + 1) * shards // count)


def owner_of(shard: int, shards: int) -> int:
    """Return the process that has a shard."""
    return ((shard + 1) * process_count() - 1) // shards


@contextlib.contextmanager
def joined() -> Generator[None]:
    """Share what runs inside with the processes that were launched together with this one, if there are any."""
    global _group
    if launched_count() < 2:
        yield
        return
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    where = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or (
        torch.distributed.get_default_backend_for_device(where) == "gloo"
    )
    state = PartialState(cpu=on_cpu, timeout=LONGEST)
    device: Any = state.device
    _group = _Group(state.process_index, state.num_processes, device)
    try:
        with together():
            yield
        state.destroy_process_group()  # after an error it might wait for a process that has ended
    finally:
        _group = None


@contextlib.contextmanager
def together() -> Generator[None]:
    """Wait for all processes at the end, and raise in all of them what one of them has raised."""
    if _group is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if not is_told(error):
            _agree(_group, error)
        raise
    _agree(_group)


def is_told(error: BaseException) -> bool:
    """Tell whether all processes raise this error."""
    return TOLD in getattr(error, "__notes__", ())


def on_first(compute: Callable[[], T]) -> T | None:
    """Return in the first process what it computes alone, while the others wait; ``None`` there."""
    if _group is None:
        return compute()
    found = None
    with together():
        if is_first():
            with _alone():
                found = compute()
    return found


def from_first(compute: Callable[[], T]) -> T:
    """Return in all processes what the first one computes alone; it holds tensors in host memory only."""
    if _group is None:
        return compute()
    from torch import distributed

    box = [on_first(compute)]
    with _connected():
        distributed.broadcast_object_list(box, 0)
    found: Any = box[0]
    return found


def broadcast(value: T, owner: int = 0) -> T:
    """Return in all processes the value of the process ``owner``, with the tensors in it, wherever they are."""
    if _group is None:
        return value
    from torch import distributed

    is_mine = process_index() == owner
    outline = gather(_outline(value) if is_mine else None)[owner]
    if is_mine:
        for tensor in _tensors(value):
            with _connected():
                distributed.broadcast(_as_bytes(tensor, _group), owner)
        return value

    def receive(buffer: "torch.Tensor") -> None:
        distributed.broadcast(buffer, owner)

    return _filled(outline, receive, _group)


def gather(value: T) -> list[T]:
    """Return in all processes the values of all, in their order; they hold tensors in host memory only."""
    if _group is None:
        return [value]
    _agree(_group)
    return _gathered(_group, value)


def collect(parcels: list[dict[str, Any]], owner: int = 0) -> Iterator[dict[str, Any]]:
    """Yield in the process ``owner`` the parcels of all processes, in their order; nothing in the others.

    Args:
        parcels: values by name, with tensors in them, wherever they are. One parcel of another process is held at a
            time.
    """
    if _group is None:
        yield from parcels
        return
    from torch import distributed

    outlines = gather([_outline(parcel) for parcel in parcels])
    if process_index() != owner:
        for tensor in (tensor for parcel in parcels for tensor in _tensors(parcel)):
            with _connected():
                distributed.send(_as_bytes(tensor, _group), owner)
        return
    for process, theirs in enumerate(outlines):
        if process == owner:
            yield from parcels
            continue

        def receive(buffer: "torch.Tensor", process: int = process) -> None:
            distributed.recv(buffer, process)

        for outline in theirs:
            yield _filled(outline, receive, _group)


def dealt(compute: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return in all processes what ``map`` does, each value computed by one of them; all call this alike.

    Args:
        items: are dealt to the processes in turn.
    """
    count, index = process_count(), process_index()
    own = {number: compute(item) for number, item in enumerate(items) if number % count == index}
    found: dict[int, T] = {}
    for owner in range(count):
        found |= broadcast(own, owner)
    return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def outside_exchanges() -> Generator[None]:
    """Share what runs inside by collectives of a library, such as those of DDP, which report no errors.

    Other processes may wait in one of them for a process that fails, and cannot be told of the error. So it ends
    without an exchange, which ends their wait, and prints the error; the first one prints its own at the end.

    Raises:
        RankfoldError: another process has ended.
    """
    if _group is None:
        yield
        return
    from torch import distributed

    try:
        yield
    except Exception as error:
        if is_told(error):
            raise
        if isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise _lost(error) from error
        error.add_note(TOLD)
        if not is_first():
            log.critical("%s", _portable(error, _group))
        raise


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """Make all functions here the identity for a while: the other processes wait."""
    global _group
    group, _group = _group, None
    try:
        yield
    finally:
        _group = group


def _agree(group: _Group, error: Exception | None = None) -> None:
    """Raise in all processes the error of the first one that has any."""
    found = _gathered(group, error and _portable(error, group))
    failed = next((index for index, one in enumerate(found) if one is not None), None)
    if failed is None:
        return
    told = error if failed == group.index and error is not None else found[failed]
    assert told is not None
    told.add_note(TOLD)
    raise told


def _portable(error: Exception, group: _Group) -> RankfoldError:
    """Return what another process can be told of an error."""
    if isinstance(error, RankfoldError):
        return error
    return RankfoldError(
        f"process {group.index} of {group.count} ended with {type(error).__name__}: {first_line(error)}"
    )


def _gathered(group: _Group, value: T) -> list[T]:
    from torch import distributed

    found: list[Any] = [None] * group.count
    with _connected():
        distributed.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def _connected() -> Generator[None]:
    """Raise one line where another process has died."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> RankfoldError:
    """Return what to raise where another process has died."""
    lost = RankfoldError(
        f"another process of this run has ended ({first_line(error)[:120]}); give the same command again: what was "
        f"finished and written is kept, for any number of processes (where it takes {option('shards')}, for the same)"
    )
    lost.add_note(TOLD)
    return lost


class _Empty(NamedTuple):
    """A tensor that is still to come."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"
    is_on_cpu: bool


def _items(value: Any) -> dict[Any, Any] | None:
    """Return what a dict, a tuple or a dataclass holds; ``None`` of anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _holding(value: Any, items: dict[Any, Any]) -> Any:
    """Return the like of a value with other items."""
    if isinstance(value, dict):
        return items
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else tuple(items.values())
    return replace(value, **items)


def _outline(value: Any) -> Any:
    """Return a value with its tensors left out."""
    import torch

    if isinstance(value, torch.Tensor):
        return _Empty(tuple(value.shape), value.dtype, value.device.type == "cpu")
    items = _items(value)
    return value if items is None else _holding(value, {key: _outline(item) for key, item in items.items()})


def _tensors(value: Any) -> Iterator["torch.Tensor"]:
    """Yield the tensors of a value in the order of its outline."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
        return
    for item in (_items(value) or {}).values():
        yield from _tensors(item)


def _filled(outline: Any, receive: Callable[["torch.Tensor"], None], group: _Group) -> Any:
    """Return the value of an outline, with its tensors received one after the other."""
    import torch

    if isinstance(outline, _Empty):
        found = torch.empty(outline.shape, dtype=outline.dtype, device=group.device)
        if found.numel():
            with _connected():
                receive(found.view(-1).view(torch.uint8))
        return found.cpu() if outline.is_on_cpu else found
    items = _items(outline)
    if items is None:
        return outline
    return _holding(outline, {key: _filled(item, receive, group) for key, item in items.items()})


def _as_bytes(tensor: "torch.Tensor", group: _Group) -> "torch.Tensor":
    """Return the bytes of a tensor where the backend can send them from; it need not know the dtype."""
    import torch

    return tensor.detach().to(group.device).contiguous().view(-1).view(torch.uint8)
