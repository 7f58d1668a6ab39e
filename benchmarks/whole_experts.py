"""Should the default remove whole experts too? REAP first and the default afterwards, against the default alone.

A small Mixtral is trained on short stories, character by character. Every row removes the same share of the weights of the
blocks: so many experts of each block by REAP, and the rest by the default, whose measured allocation then chooses among the
units of the experts that are left and of attention. REAP leaves each block as many experts, as a stock config has one number.
Perplexity is on stories it has not seen.

    python benchmarks/whole_experts.py
"""

import torch
from torch import nn

import common
import experts
from rankfold import CalibrationData, compress, open_model, perplexity
from rankfold.allocation import block_weights

SHAPE = experts.SHAPE | {"num_hidden_layers": 4}
STEPS, BATCH = 800, 16
SPARSITIES, REMOVED, WINDOWS = (0.15, 0.3, 0.5), (0, 1, 2, 4), 128
TEXT = "text/tinystories_val_sample.txt"
DEFINITIONS = {
    "perplexity": "of characters, on 128 windows of 64 held-out characters",
    "removed_experts": "of the 8 of every block, by REAP in one pass; the default does the rest",
    "sparsity": "share of the linear weights of the blocks that is removed, by both together",
}


def main() -> None:
    parser = common.arguments(__doc__, "whole_experts")
    common.add_data(parser)
    args = parser.parse_args()
    text = common.data_file(args.data, TEXT).read_text(encoding="utf-8")
    order = {character: i for i, character in enumerate(sorted(set(text)))}
    fit, held_out = torch.tensor([order[character] for character in text]).tensor_split([len(text) * 9 // 10])
    evaluation = held_out[: 128 * experts.WINDOW].view(-1, experts.WINDOW)
    dense = experts.train(fit, len(order), SHAPE, STEPS, BATCH)
    config = {"shape": SHAPE, "steps": STEPS, "batch": BATCH, "windows": WINDOWS, "text": TEXT}
    record = common.Record(args.json, config, DEFINITIONS)
    record.add("dense", perplexity=perplexity(dense, evaluation)["perplexity"])
    common.say(f"dense: {record.value['rows'][-1]['perplexity']:.4f}")
    tokens = experts.drawn(fit, WINDOWS, seed=0)
    for sparsity in SPARSITIES:
        for removed in REMOVED:
            if (model := together(dense, tokens, sparsity, removed)) is not None:
                facts = {"sparsity": sparsity, "removed_experts": removed}
                record.add(
                    f"{sparsity:g}, {removed} experts", **facts, perplexity=perplexity(model, evaluation)["perplexity"]
                )
                common.say(f"{record.value['rows'][-1]['name']}: {record.value['rows'][-1]['perplexity']:.4f}")


def together(dense: nn.Module, tokens: CalibrationData, sparsity: float, removed: int) -> nn.Module | None:
    """Remove so many experts of every block, and by the default what the sparsity asks for beyond that; ``None``: too many."""
    whole, model = weights(dense), dense
    if removed:
        share = removed / SHAPE["num_local_experts"] * in_experts(dense) / whole
        source = open_model(dense, device="cpu")
        model = compress(source, share, method="reap", calibration=tokens, mode="one-pass").model
    rest = 1 - (1 - sparsity) * whole / weights(model)
    if rest < 0:
        return None
    return compress(open_model(model, device="cpu"), rest, calibration=tokens).model


def weights(model: nn.Module) -> int:
    """Count the linear weights of the blocks."""
    return sum(map(block_weights, model.model.layers))


def in_experts(model: nn.Module) -> int:
    """Count those that belong to experts, the rows of the router among them."""
    return sum(tensor.numel() for block in model.model.layers for tensor in block.mlp.parameters())


if __name__ == "__main__":
    main()
