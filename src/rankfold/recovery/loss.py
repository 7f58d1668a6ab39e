"""Losses of a compressed model against the dense one, over chunks of positions, so that no whole vocabulary is held.

Shape legend: B sequences, T tokens, n positions of a chunk, D hidden width, V vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .._utils.present import present

Loss = Literal["kl", "next-token", "both"]
POSITIONS = 128  # of every sequence whose logits are held at once
IN_CACHE = 200_000  # logits that a core works on at once, 0.8 MB in fp32


class _Sent(BaseModelOutputWithPast):
    """Hidden states and nothing else, whatever else a family's decoder returns."""

    def __getattr__(self, name: str) -> None:
        return None


class Head:
    """A model's logits of its last hidden states, with scales and caps of its own.

    The model's forward runs with its decoder replaced by the states that are given.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.decoder = model, model.get_decoder()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the ``(B, n, V)`` logits of ``(B, n, D)`` hidden states."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        self.decoder.forward = lambda *_, **__: _Sent(last_hidden_state=hidden)
        try:
            return self.model(input_ids=ids, use_cache=False).logits
        finally:
            del self.decoder.forward


def hidden_states(model: nn.Module, decoder: nn.Module, ids: Tensor) -> Tensor:
    """Return the ``(B, T, D)`` states that the head of a model reads.

    Args:
        model: what is called: the model itself, or a wrapper of it (adapters, data parallelism).
        decoder: the model's own decoder, wherever it is in the wrapper.
        ids: ``(B, T)`` token ids.
    """
    found = []
    hook = decoder.register_forward_hook(lambda _, __, output: found.append(output.last_hidden_state))
    last = torch.tensor([ids.shape[1] - 1], device=ids.device)  # by a number Gemma 4 keeps as few states as logits
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=last)
    finally:
        hook.remove()
    return found[0]


def kl_divergence(dense: Tensor, compressed: Tensor) -> Tensor:
    """Return ``sum_v p_v (log p_v - log q_v)`` in nats at every position.

    ``p`` is of the dense model and ``q`` of the compressed one. The gradient goes to the logits of the compressed model
    alone: it is ``q - p``.

    Args:
        dense, compressed: ``(..., V)`` logits.
    """
    return _Divergence.apply(dense, compressed)


class _Divergence(torch.autograd.Function):
    """The divergence with a gradient in closed form: a vocabulary is wide, so every pass over it counts."""

    @staticmethod
    def forward(ctx, dense: Tensor, compressed: Tensor) -> Tensor:
        gradient = torch.empty_like(compressed, memory_format=torch.contiguous_format)
        found = []
        for wanted, some, out in zip(*map(_in_cache, (dense, compressed, gradient)), strict=True):
            log_p, log_q = (logits.log_softmax(-1, dtype=torch.float32) for logits in (wanted, some))
            p = log_p.exp()
            found.append(torch.linalg.vecdot(p, log_p.sub_(log_q)))
            out.copy_(log_q.exp_().sub_(p))
        ctx.save_for_backward(gradient)
        return torch.cat(found).view(dense.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[None, Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * upstream[..., None].to(gradient.dtype)


def _in_cache(logits: Tensor) -> tuple[Tensor, ...]:
    """Split logits into rows that the caches of a CPU hold through all passes; they are 3 times as fast there."""
    rows = logits.flatten(0, -2)
    at_once = IN_CACHE * torch.get_num_threads() // rows.shape[1] if rows.device.type == "cpu" else len(rows)
    return rows.split(max(1, at_once))


def training_loss(
    student: Head,
    compressed: Tensor,
    ids: Tensor,
    *,
    loss: Loss,
    teacher: Head | None = None,
    dense: Tensor | None = None,
) -> Tensor:
    """Return the mean loss in nats per predicted token.

    The gradient of a chunk of positions is taken at once, with its loss, so that memory does not grow with sequences
    times vocabulary and no logits are computed twice. It goes to the hidden states; the head itself is not trained.

    Args:
        student: head of the compressed model.
        compressed: ``(B, T, D)`` its hidden states.
        ids: ``(B, T)`` the tokens; the last position of a sequence predicts none.
        loss: ``kl``: divergence from the dense model's predictions. ``next-token``: cross entropy of the text.
            ``both``: their sum.
        teacher, dense: head and hidden states of the dense model; not needed for ``next-token``.
    """

    def chunk(begin: int, hidden: Tensor) -> Tensor:
        logits, end, found = student(hidden), begin + hidden.shape[1], []
        if loss != "kl":
            found.append(
                nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), ids[:, begin + 1 : end + 1].flatten(), reduction="sum"
                )
            )
        if loss != "next-token":
            with torch.no_grad():
                wanted = present(teacher)(present(dense)[:, begin:end])
            found.append(kl_divergence(wanted, logits).sum())
        return torch.stack(found).sum()

    predicted = compressed[:, :-1]
    return _Chunks.apply(predicted, chunk) / predicted[..., 0].numel()


class _Chunks(torch.autograd.Function):
    """The sum of a function over chunks of positions, whose gradient is known once the sum is."""

    @staticmethod
    def forward(ctx, hidden: Tensor, chunk: Callable[[int, Tensor], Tensor]) -> Tensor:
        trained, sums, gradients = ctx.needs_input_grad[0], [], []
        for begin, some in zip(range(0, hidden.shape[1], POSITIONS), hidden.split(POSITIONS, 1), strict=True):
            some = some.detach().requires_grad_(trained)
            with torch.set_grad_enabled(trained):
                found = chunk(begin, some)
            if trained:
                with torch.autocast(hidden.device.type, enabled=False):  # a backward pass has the dtypes of its forward
                    gradients += torch.autograd.grad(found, some)
            sums.append(found.detach())
        if gradients:
            ctx.save_for_backward(torch.cat(gradients, 1))
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None
