"""Raw data of the three module types of MoDeGPT: MLP activations, query-key sequences, value-output pairs."""

from typing import NamedTuple

import torch
from problems import activations
from torch import Tensor


class MLP(NamedTuple):
    a: Tensor  # (n, F) hidden activations, the input of the down projection
    W: Tensor  # (D, F) down projection

    @property
    def C(self) -> Tensor:
        return self.a.T @ self.a / len(self.a)


def mlp(kind: str, *, F: int = 12, D: int = 5, tokens: int = 300, seed: int = 0) -> MLP:
    """Activations of one kind out of :data:`problems.KINDS`; ``low_rank`` ones fill 5 dimensions."""
    g = torch.Generator().manual_seed(seed + 3000)
    return MLP(activations(kind, F, tokens=tokens, seed=seed), torch.randn(D, F, generator=g, dtype=torch.float64))


class QueryKey(NamedTuple):
    Q: Tensor  # (S, H, T, N) queries of one group
    K: Tensor  # (S, T, N) keys of its key head

    @property
    def C_q(self) -> Tensor:  # (H, N, N), un-normalised sums over sequences
        return torch.einsum("shtn,shtm->hnm", self.Q, self.Q)

    @property
    def C_k(self) -> Tensor:  # (N, N)
        return torch.einsum("stn,stm->nm", self.K, self.K)

    def cost(self, dropped: Tensor) -> float:
        """``sum over sequences and heads of ||Q K^T - Q_keep K_keep^T||^2``, from the raw scores."""
        lost = torch.einsum("shtn,sun->shtu", self.Q[..., dropped], self.K[..., dropped])
        return lost.square().sum().item()


def query_key(*, N: int = 8, H: int = 2, T: int = 6, sequences: int = 3, decay: float = 0.5, seed: int = 0) -> QueryKey:
    """Correlated queries and keys with a mean, whose energy falls off over a random order of the dimensions."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mix, mean = torch.eye(N, dtype=torch.float64) + 0.4 * draw(N, N), draw(N)
    scale = torch.exp(-decay * torch.arange(N, dtype=torch.float64))[torch.randperm(N, generator=g)]
    Q = (draw(sequences, H, T, N) @ mix + mean) * scale
    return QueryKey(Q, (draw(sequences, T, N) @ mix + draw(N)) * scale.flip(0).sqrt())


class ValueOutput(NamedTuple):
    x: Tensor  # (n, d) input of the value projection
    W_v: Tensor  # (N, d)
    W_o: Tensor  # (G, d, N) output projections of the query heads of the group

    @property
    def C(self) -> Tensor:
        return self.x.T @ self.x / len(self.x)

    @property
    def A(self) -> Tensor:
        return self.W_v @ self.C @ self.W_v.T

    @property
    def B(self) -> Tensor:
        return torch.einsum("gdn,gdm->nm", self.W_o, self.W_o)

    def measured(self, new_v: Tensor, new_o: Tensor) -> float:
        """``E sum_j ||W_o,j W_v x - new_o,j new_v x||^2`` on the raw inputs."""
        gap = self.W_o @ self.W_v - new_o @ new_v  # (G, d, d)
        return (self.x @ gap.mT).square().sum().item() / len(self.x)


def value_output(kind: str, *, N: int = 6, d: int = 14, G: int = 1, seed: int = 0) -> ValueOutput:
    g = torch.Generator().manual_seed(seed + 4000)
    W_v = torch.randn(N, d, generator=g, dtype=torch.float64)
    return ValueOutput(activations(kind, d, seed=seed), W_v, torch.randn(G, d, N, generator=g, dtype=torch.float64))
