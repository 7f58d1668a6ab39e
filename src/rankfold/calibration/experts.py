"""What experts receive, and from it the moments of one expert at a time.

A block has up to hundreds of experts, and all their second moments together are larger than its weights: E F^2 numbers
against 3 E D F. So what is kept of a block are its tokens, which all experts share, and the moment of an expert is made
when its turn comes.

Shape legend: E experts, n tokens, k experts of a token, D model width, F hidden width of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..architectures import ExpertsView, Norm
from ..modules.experts import activation_of, sent_rows
from .moments import BlockMoments, Moment, VectorMoment, wide
from .observers import Observer, rms

INPUT, ROUTING = "experts_input", "experts_routing"
STATISTICS = {INPUT, ROUTING}
PER_UNIT = 4  # tokens that an expert should have seen for every hidden unit; more helps where text is very short only
ROWS = 4096  # tokens whose activations exist at a time


class _Caught(Observer):
    """What the experts of a block are called with, and what they send."""

    def __init__(self, experts: ExpertsView):
        self.experts, self.rows = experts, list[Tensor]()
        self.caught: tuple[Tensor, ...] = ()

    def hooks(self):
        return [self.experts.module.register_forward_hook(self._catch)]

    def _catch(self, _, args, output) -> None:
        if len(args) == 1:  # Llama 4
            rows, chosen = sent_rows(args[0], self.experts.count)
            args, output = (args[0][rows], chosen, torch.ones_like(chosen)), output[rows]
        self.caught = (*args, output)

    def finish(self) -> Moment:
        rows = torch.cat(self.rows)
        return Moment(len(rows), rows=rows)


class ExpertInputs(_Caught):
    """The tokens themselves, ``(n, D)``, as precise as the stream is kept."""

    def after(self, batch) -> None:
        (tokens, *_), self.caught = self.caught, ()
        self.rows.append(tokens.detach().to(batch.hidden.dtype))


class RouterWeights(_Caught):
    """``(n, E)`` what each token's output of each expert is multiplied with; 0 where it is not sent there.

    Args:
        norm: that the sum of all these goes through; they are then divided by its RMS.
    """

    def __init__(self, experts: ExpertsView, norm: Norm | None = None):
        super().__init__(experts)
        self.norm = norm

    def after(self, batch) -> None:
        (_, chosen, weights, sent), self.caught = self.caught, ()
        weights = weights.float() if self.norm is None else weights.float() / rms(sent, self.norm)
        spread = weights.new_zeros(len(chosen), self.experts.count)
        self.rows.append(spread.scatter_(1, chosen, weights))


class ExpertMoment(NamedTuple):
    """Of what one expert, or its down projection, receives, times the weight with which its output counts."""

    moment: Moment | Any  # counts squared weights; None before it is made, and once it has been used
    tokens: int  # that were sent to the expert
    filled: int  # other tokens that were added, because these were too few
    share: float  # squared weights of its own tokens


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that went through the experts of one block."""

    experts: ExpertsView
    tokens: Tensor  # (n, D)
    weights: Tensor  # (n, E)

    @classmethod
    def of(cls, experts: ExpertsView, moments: BlockMoments) -> "RoutedTokens":
        """From the two statistics of a block."""
        device = experts.module.down_proj.device
        return cls(experts, moments[INPUT].rows.to(device), moments[ROUTING].rows.to(device))

    def sent(self, expert: int) -> tuple[Tensor, Tensor]:
        """``(m,)`` which tokens go to an expert, and with which weights."""
        weights = self.weights[:, expert]
        which = weights.nonzero()[:, 0]
        return which, weights[which]

    def activations(self, expert: int, which: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Weighted activations ``(m, F)`` of tokens, and the weights ``(m,)``, fp32, some at a time."""
        rising, activate = self.experts.rising(expert), activation_of(self.experts.module)
        for some, w in zip(which.split(ROWS), weights.split(ROWS), strict=True):
            risen = nn.functional.linear(self.tokens[some].to(rising.weight), rising.weight, rising.bias)
            yield activate(risen).float() * w[:, None], w

    def inputs(self, which: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Weighted tokens ``(m, D)`` themselves, and the weights, as :meth:`activations`."""
        for some, w in zip(which.split(ROWS), weights.split(ROWS), strict=True):
            yield self.tokens[some].float() * w[:, None], w

    def moment(self, expert: int) -> ExpertMoment:
        r"""Of ``w h``, ``h`` the hidden units and ``w`` the router's weight: a fit that makes
        :math:`\mathbb{E}\,w^2\|W h - W' h_k\|^2` least makes its part of the block's error least. See :meth:`_seen`.
        """
        which, weights, seen = self._seen(expert)
        return seen._replace(moment=_summed(self.activations(expert, which, weights), weights))

    def input_moment(self, expert: int) -> ExpertMoment:
        """Of ``w x``, ``x`` the tokens that an expert receives; likewise."""
        which, weights, seen = self._seen(expert)
        return seen._replace(moment=_summed(self.inputs(which, weights), weights))

    def _seen(self, expert: int) -> tuple[Tensor, Tensor, ExpertMoment]:
        """Which tokens an expert is fitted to, and with which weights.

        An expert that saw fewer than ``PER_UNIT`` tokens for every hidden unit is given more, evenly out of all, as if
        they had been sent to it with the weight that its own have in the mean square: its moment is shrunk towards the
        pooled one.
        """
        which, weights = self.sent(expert)
        tokens, share = len(which), weights.double().square().sum().item()
        filled = min(max(0, PER_UNIT * self.experts.hidden - tokens), len(self.tokens))
        if filled:
            usual = (share / tokens) ** 0.5 if tokens else 1.0
            others = (
                torch.linspace(0, len(self.tokens) - 1, filled, dtype=torch.float64).round().long().to(which.device)
            )
            which, weights = torch.cat([which, others]), torch.cat([weights, weights.new_full((filled,), usual)])
        return which, weights, ExpertMoment(None, tokens, filled, share)


def energies(parts: Iterator[tuple[Tensor, Tensor]], centre: Tensor | None, *matrices: Tensor) -> Tensor:
    """Sum ``||M r||^2`` over weighted rows, for every matrix ``M``, fp64; rows about ``centre`` if a bias took it."""
    found = torch.zeros(len(matrices), dtype=torch.float64)
    for rows, weights in parts:
        rows = rows if centre is None else rows - weights[:, None] * centre.to(rows)
        found += torch.tensor([(rows @ M.T).square().sum().item() for M in matrices], dtype=torch.float64)
    return found


def _summed(parts: Iterator[tuple[Tensor, Tensor]], weights: Tensor) -> Moment:
    """Of weighted rows, some of which come at a time with their weights."""
    sums, total = VectorMoment(), torch.zeros(())
    for rows, w in parts:
        sums.add(rows)
        total = total + wide(w @ rows)
    return Moment(weights.double().square().sum().item(), total, second=sums.finish().second)
