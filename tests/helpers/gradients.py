"""Gradients of the loss of a stock model, by one graph of the whole of it: no sweep and no moments of rankfold."""

from torch import Tensor, nn

from activations import blocks_of


def stock_gradients(model: nn.Module, ids: Tensor, paths: dict[int, dict[str, str]]) -> dict[tuple[int, str], Tensor]:
    """``(n, out)`` gradient of the summed next-token loss at the output of layers, fp64.

    Args:
        paths: block -> name -> path of a layer in it. Gradients of weights are left in the model.
    """
    caught, hooks = {}, []
    for index, block in enumerate(blocks_of(model)):
        for name, path in paths.get(index, {}).items():

            def keep(_, __, output, key=(index, name)):
                output.retain_grad()
                caught[key] = output

            hooks.append(block.get_submodule(path).register_forward_hook(keep))
    logits = model(ids).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    return {key: output.grad.reshape(-1, output.shape[-1]).double() for key, output in caught.items()}
