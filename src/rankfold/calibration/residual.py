"""Observers of the residual stream: before a block, between its halves, after it, and beside the dense model's.

Shape legend: B sequences of a batch, T tokens, D model width.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._utils.present import present
from ..architectures import BlockView
from .moments import CrossSums, Moment, VectorMoment, wide
from .observers import LayerInput, Observer


class Middle:
    """The residual stream between attention and MLP; in a parallel block the input plus what attention adds; what
    enters a block without attention."""

    def __init__(self, view: BlockView):
        self.view, self.attention = view, view.attention
        self._caught: Tensor | Any = None

    def hooks(self):
        if not self.attention.spec.is_there:
            return []
        if self.view.middle is not None:
            return [self.view.middle.register_forward_pre_hook(lambda _, args: self._catch(args[0]))]

        def catch(_: Any, __: Any, output: Any) -> None:
            self._catch(output[0] if isinstance(output, tuple) else output)

        return [self.attention.module.register_forward_hook(catch)]

    def _catch(self, x: Tensor) -> None:
        self._caught = x

    def take(self, hidden: Tensor) -> Tensor:
        """``(B, T, D)`` of the batch ``hidden`` that just ran."""
        if not self.attention.spec.is_there:
            return hidden
        caught, self._caught = self._caught.view_as(hidden), None
        return hidden + caught if self.view.middle is None else caught


class FeedbackObserver(Observer):
    """What an output projection receives, with what the dense stream has and this one lacks without its output.

    Attention: the dense stream after attention minus this block's input. MLP: the dense stream after the block minus
    this stream after attention. A projection that gave exactly this would repair all that was lost before it.
    """

    def __init__(self, view: BlockView, module: nn.Module, *, attention: bool):
        self.input, self.attention = LayerInput(module), attention
        self.middle: Middle | Any = None if attention else Middle(view)
        self.sums = CrossSums()

    def hooks(self):
        return [*self.input.hooks(), *(self.middle.hooks() if self.middle else ())]

    def after(self, batch) -> None:
        x = self.input.take()
        if self.attention:
            target = batch.dense.middle.float() - batch.hidden.float()
        else:
            target = batch.dense.output.float() - self.middle.take(batch.hidden).float()
        self.sums.add(x, target)


class StreamObserver(Observer):
    """Second moment of the residual stream before the block, between its halves or after it.

    Every vector is normalised as the norms of the block do, with neither scale nor shift: all tokens count alike.
    """

    def __init__(self, view: BlockView, place: Literal["input", "middle", "output"]):
        self.place, self.middle = place, Middle(view)
        self.centred = present(view.architecture.norms).is_layernorm
        self.sums = VectorMoment()

    def hooks(self):
        return self.middle.hooks() if self.place == "middle" else []

    def after(self, batch) -> None:
        x = {"input": batch.hidden, "output": batch.output}.get(self.place)
        x = (self.middle.take(batch.hidden) if x is None else x).float()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        self.sums.add(x * x.square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).rsqrt())


class InfluenceObserver(Observer):
    """``1 - cosine`` of input and output of the block, its attention and its MLP (MoDeGPT Sec. 3.3, Eq. 42)."""

    def __init__(self, view: BlockView):
        self.middle, self.parallel = Middle(view), view.middle is None
        self.total: Tensor | Any = 0.0  # (3,) fp64, beside the stream: to look at each batch would wait for the device
        self.rows = 0

    def hooks(self):
        return self.middle.hooks()

    def after(self, batch) -> None:
        hidden, output, middle = batch.hidden, batch.output, self.middle.take(batch.hidden)
        # In a parallel block each half alone moves the block's input.
        half = (hidden, output - (middle - hidden)) if self.parallel else (middle, output)
        pairs = [(hidden, output), (hidden, middle), half]
        cosines = (nn.functional.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in pairs)
        self.total += torch.stack([wide(1 - cosine).sum() for cosine in cosines])
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, self.total.cpu())


class ChangeObserver(Observer):
    """Squared norm of what a block adds to its input, and of its output."""

    def __init__(self):
        self.total: Tensor | Any = 0.0  # (2,) fp64, beside the stream
        self.rows = 0

    def after(self, batch) -> None:
        hidden, output = batch.hidden.float(), batch.output.float()
        self.total += torch.stack([wide(x.square().sum()) for x in (output - hidden, output)])
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, self.total.cpu())
