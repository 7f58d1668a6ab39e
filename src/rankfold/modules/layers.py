"""From a description to a linear layer."""

from torch import nn

from .descriptions import check_description
from .latent import LatentLinear, SplitHeadLinear
from .sparse import SparseLinear


class NoWeights(nn.Linear):
    """A bias, or nothing: there is no weight to initialise, of which ``nn.Linear`` warns."""

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _linear(spec: dict) -> nn.Module:
    kind = nn.Linear if spec["in"] and spec["out"] else NoWeights
    return kind(spec["in"], spec["out"], bias=spec["bias"])


LAYERS = {"linear": _linear, "latent": LatentLinear, "split_head": SplitHeadLinear, "sparse": SparseLinear}


def build_layer(spec: dict) -> nn.Module:
    """The layer a description stands for; weights are uninitialised.

    Raises:
        ValueError: see :func:`~.descriptions.check_description`.
    """
    check_description(spec, LAYERS)
    return LAYERS[spec["kind"]](spec)
