"""Relative errors of decomposed modules on any moments: those of the fit, or of held-out samples.

Shape legend: O outputs, N inputs, H query heads, K key/value heads, h head dimension, D model width.

A measure keeps the dense projections of one form and is called with what they have become, by module, and with the
moments of a block. On the moments of the fit it gives the ``relative_error`` of the report.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import BlockMoments, Moment
from ...linalg.joint_mlp import MLP, mlp_error
from ...linalg.lowrank import metric_error, spread
from ...linalg.pair_error import Pair, pair_error
from ...modules import build
from ..result import Latent

Measure = Callable[[Mapping[str, Dense], BlockMoments], float]
ROWS = 1024  # of the identity that a runtime module is run on at a time


@dataclass(frozen=True)
class OutputError:
    """Of one layer's output, the mean included where its bias takes it."""

    name: str
    statistic: str
    dense: Dense
    centred: bool

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        now, W = compressed[self.name], self.dense.weight.double()
        return _output_error(W - now.weight, W, _bias(self.dense), _bias(now), moments[self.statistic], self.centred)


@dataclass(frozen=True)
class ScoreError:
    """Of the scores of independent tokens (LatentLLM Eq. 13), at the offsets ``rotations`` has."""

    q: Dense
    k: Dense
    head_dim: int
    centred: bool
    rotations: Tensor | None  # (D, h, h)

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        moment = moments["attention_input"]
        C = moment.covariance() if self.centred else moment.second_moment()
        pairs = (self._pair(q, k, moment) for q, k in ((self.q, self.k), (compressed["q"], compressed["k"])))
        return pair_error(*pairs, metrics=(C, C), rotations=self.rotations)

    def _pair(self, q: Dense, k: Dense, moment: Moment) -> Pair:
        sides = [d.weight.double().unflatten(0, (-1, self.head_dim)) for d in (q, k)]
        if not self.centred:
            return Pair(*sides)
        means = (side @ moment.mean for side in sides)
        return Pair(*sides, *(m + _bias(d).view_as(m) for m, d in zip(means, (q, k), strict=True)))


@dataclass(frozen=True)
class HeadError:
    """Of the outputs of heads (LatentLLM Eq. 184): of the mean with them, or of its sum where the output's bias takes
    it."""

    v: Dense
    o: Dense
    head_dim: int
    shifted: bool  # whether the output's bias takes the mean

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        moment = moments["attention_input"]
        C = moment.covariance()
        dense, now = (self._pair(v, o, moment) for v, o in ((self.v, self.o), (compressed["v"], compressed["o"])))
        error = pair_error(dense, now, metrics=(None, C))
        if not self.shifted:
            return error
        mean = self._mean(self.v, self.o, moment)
        shift = mean - self._mean(compressed["v"], compressed["o"], moment)
        return (error**2 + (shift.square().sum() / spread(self._energy(dense, C), mean)).item()) ** 0.5

    def _pair(self, v: Dense, o: Dense, moment: Moment) -> Pair:
        outputs = o.weight.double().unflatten(1, (-1, self.head_dim)).permute(1, 2, 0)  # (H, h, D)
        values = v.weight.double().unflatten(0, (-1, self.head_dim))
        mean = None if self.shifted else values @ moment.mean + _bias(v).unflatten(0, (-1, self.head_dim))
        return Pair(outputs, values, None, mean)

    def _mean(self, v: Dense, o: Dense, moment: Moment) -> Tensor:
        return o.weight.double() @ _sent(v, o, moment.mean, self.head_dim) + _bias(o)

    @staticmethod
    def _energy(pair: Pair, C: Tensor) -> Tensor:
        values = pair.right @ C @ pair.right.mT
        return ((pair.left @ pair.left.mT) * values.repeat_interleave(len(pair.left) // len(pair.right), 0)).sum()


@dataclass(frozen=True)
class AttendedError:
    """Of the output projection on what attention sends into it, values predicted by ``E`` (LatentLLM Eq. 205)."""

    v: Dense
    o: Dense
    head_dim: int
    centred: bool
    E: Tensor  # (H h, H h)
    mean: Tensor  # (D,) mean token of the fit, around which E predicts

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        now, W = compressed["o"], self.o.weight.double()
        fixed = _bias(now)
        if self.centred:
            before, after = (_sent(v, self.o, self.mean, self.head_dim) for v in (self.v, compressed["v"]))
            fixed = fixed + now.weight @ (after - self.E @ before)
        rows = now.weight @ self.E
        return _output_error(W - rows, W, _bias(self.o), fixed, moments["attention_output"], self.centred)


@dataclass(frozen=True)
class MLPError:
    """Of the output of a ReLU MLP, on rows of its input."""

    up: Dense
    down: Dense

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        now = mlp_of(compressed["up"], compressed["down"])
        return mlp_error(mlp_of(self.up, self.down), now, moments["mlp_samples"].rows.T)


@dataclass(frozen=True)
class InHeads:
    """A measure of modules whose heads are stored in other coordinates, ``y = T y'``; of ``o`` those are its inputs."""

    measure: Measure
    names: tuple[str, ...]
    T: Tensor  # (H or K, h, h)

    def __call__(self, compressed: Mapping[str, Dense], moments: BlockMoments) -> float:
        return self.measure({name: self._back(name, compressed[name]) for name in self.names}, moments)

    def _back(self, name: str, now: Dense) -> Dense:
        if name == "o":
            return Dense(on_heads(torch.linalg.inv(self.T).mT, now.weight.T).T, now.bias)
        bias = None if now.bias is None else on_heads(self.T, now.bias[:, None])[:, 0]
        return Dense(on_heads(self.T, now.weight), bias)


def of_heads(T: Tensor, rows: Tensor) -> Tensor:
    """Return ``T`` (K, h, h) of every group of heads as those of all heads of ``rows`` (H h, any)."""
    return T.repeat_interleave(len(rows) // (len(T) * T.shape[-1]), 0)


def on_heads(T: Tensor, rows: Tensor) -> Tensor:
    """Return ``T`` (K, h, h) of each group times the rows (H h, any) of its heads."""
    return (of_heads(T, rows) @ rows.to(T).unflatten(0, (-1, T.shape[-1]))).flatten(0, 1)


def mlp_of(up: Dense, down: Dense) -> MLP:
    return MLP(up.weight, up.bias, down.weight, down.bias)


@torch.no_grad()
def as_dense(projection: Latent) -> Dense:
    """The projection it amounts to, in fp64: a runtime module is run on the identity."""
    spec, tensors = projection.spec, projection.tensors
    tensors = {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
    with torch.device("meta"):
        module = build(spec)
    module.load_state_dict(tensors, assign=True)
    bias, columns = tensors["bias"] if spec["bias"] else None, []
    for a in range(0, spec["in"], ROWS):
        x = next(iter(tensors.values())).new_zeros(min(ROWS, spec["in"] - a), spec["in"], dtype=torch.float64)
        x.diagonal(a).fill_(1)
        y = module(x)
        columns.append((y if bias is None else y - bias).T)
    return Dense(torch.cat(columns, 1), bias)


def _output_error(gap: Tensor, W: Tensor, before: Tensor, after: Tensor, moment: Moment, centred: bool) -> float:
    if not centred:
        return metric_error(gap, W, moment.second_moment())
    mean = W @ moment.mean + before
    shift = gap @ moment.mean + before - after
    return metric_error(gap, W, moment.covariance(), shift=shift, mean=mean)


def _sent(v: Dense, o: Dense, mean: Tensor, head_dim: int) -> Tensor:
    """``(H h,)`` what attention sends into the output projection for the mean token."""
    values = (v.weight.double() @ mean + _bias(v)).view(-1, head_dim)
    return values.repeat_interleave(o.weight.shape[1] // values.numel(), 0).flatten()


def _bias(dense: Dense) -> Tensor:
    W = dense.weight
    return W.new_zeros(len(W), dtype=torch.float64) if dense.bias is None else dense.bias.double()
