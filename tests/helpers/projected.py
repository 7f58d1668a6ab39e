"""The stock model with hooks that project its stream onto subspaces, which are found from raw activations.

No rotations, no folded norms, no shortcuts: what a sliced model must compute.

Shape legend: D width of the dense stream, r of the sliced one.
"""

import torch
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, OUTPUT, blocks_of, member
from families import some_ids, tiny_model, tokens

PARALLEL = {
    "phi",
    "gpt_neox",
    "falcon-mqa",
    "falcon-gqa",
    "falcon-gqa-one-norm",
    "cohere",
    "cohere2",
    "stablelm-parallel",
}


def varied(family: str, blocks: int | None = None) -> nn.Module:
    """A tiny model whose norms scale and whose stream has a mean: both are folded into matrices."""
    model = tiny_model(family, blocks=blocks)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.get_input_embeddings().weight.data += 0.2
    return model


def opened(family: str, blocks: int | None = None):
    """The same, open, its blocks run in fp32."""
    source = rankfold.open_model(varied(family, blocks), device="cpu")
    source.autocast = None
    return source


@torch.no_grad()
def logits(model, ids=None) -> Tensor:
    return model(some_ids() if ids is None else ids, use_cache=False).logits


@torch.no_grad()
def has_layer_norms(model) -> bool:
    """Whether adding a number to all of its input changes nothing after the first norm."""
    norm = next(m for name, m in blocks_of(model)[0].named_children() if "norm" in name or name.startswith("ln_"))
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).dtype)
    return torch.allclose(norm(x), norm(x + 1), atol=1e-5)


class Projected:
    """A model whose stream is projected where the method slices it, on subspaces of the rows that come by there.

    Args:
        model: with the blocks' own norms; it gets the hooks.
        parallel: whether attention and MLP read the same stream.
        rank: r.
    """

    def __init__(self, model: nn.Module, rank: int, *, parallel: bool):
        self.model, self.rank, self.errors, self.held_out = model, rank, {}, {}
        self.centred, self.entered = has_layer_norms(self.model), None
        for index, block in enumerate(blocks_of(self.model)):
            block.register_forward_pre_hook(self._note, with_kwargs=True)
            if index == 0:
                self._project(block, index, "input")
            if not parallel:
                self._project(block, index, "middle")
            self._project(block, index, "output")

    def _note(self, _, args, kwargs):
        self.entered = args[0] if args else kwargs["hidden_states"]

    def _project(self, block, index: int, place: str) -> None:
        P = torch.eye(32)
        rows = []

        def seen(x):
            rows.append(x.flatten(0, -2).double())
            return x @ P

        def enters(_, args, kwargs):
            self.entered = seen(args[0] if args else kwargs.pop("hidden_states"))
            return (self.entered, *args[1:]), kwargs

        def leaves(_, __, out):
            return (seen(out[0]), *out[1:]) if isinstance(out, tuple) else seen(out)

        if place == "input":
            block.register_forward_pre_hook(enters, with_kwargs=True)
        elif place == "middle":  # the residual branch cannot be reached: what attention adds makes up for it
            output = member(member(block, ATTENTION), OUTPUT)
            output.register_forward_hook(lambda _, __, out: seen(self.entered + out) - self.entered)
        else:
            block.register_forward_hook(leaves)
        logits(self.model, tokens().ids)
        X = self._normalised(torch.cat(rows))
        V = torch.linalg.svd(X, full_matrices=False).Vh[: self.rank].T
        self.errors[index, place] = self._lost(X, V)
        rows.clear()
        logits(self.model, tokens().held_out)
        self.held_out[index, place] = self._lost(self._normalised(torch.cat(rows)), V)
        P = (V @ V.T).float()

    def _normalised(self, X: Tensor) -> Tensor:
        X = X - X.mean(-1, keepdim=True) if self.centred else X
        return X / X.square().mean(-1, keepdim=True).sqrt()

    @staticmethod
    def _lost(X: Tensor, V: Tensor) -> float:
        return ((X - X @ V @ V.T).norm() / X.norm()).item()
