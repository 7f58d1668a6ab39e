"""Influence of attention and MLP in every family, against hooks on the stock model."""

import pytest
import torch

import rankfold
from families import CONFIGS, opened, some_ids, tiny_model
from rankfold import CalibrationData

# What ends each half of a block, by the stock model's own names. "added": the output is added to the stream; "stream":
# it is the stream; "behind": the stream enters it. Parallel blocks: both halves are added to the block's input.
LLAMA = ("self_attn", "added"), None
SANDWICH = ("post_attention_layernorm", "added"), None  # these normalise what attention adds
SCALED = ("post_attention_layernorm", "behind"), None
PARALLEL = ("self_attn", "added"), "mlp"
NEOX_PARALLEL, FALCON_PARALLEL = (("attention", "added"), "mlp"), (("self_attention", "added"), "mlp")
FALCON_SEQUENTIAL = ("self_attention", "added"), None
HALVES = dict.fromkeys(CONFIGS, LLAMA) | {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gemma3-images": SANDWICH,
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), SANDWICH),
    "glm4": (("post_self_attn_layernorm", "added"), None),
    **dict.fromkeys(("granite", "granitemoe"), SCALED),
    **dict.fromkeys(("phi", "cohere", "cohere2", "stablelm-parallel"), PARALLEL),
    "opt-post-norm": (("self_attn_layer_norm", "stream"), None),
    **dict.fromkeys(("gpt2", "gpt_neo", "mpt"), (("attn", "added"), None)),
    "gptj": (("attn", "added"), "mlp"),
    "gpt_neox": NEOX_PARALLEL,
    "gpt_neox-sequential": (("attention", "added"), None),
    "falcon-mqa": FALCON_PARALLEL,
    "falcon-gqa": FALCON_PARALLEL,
    "falcon-gqa-one-norm": FALCON_PARALLEL,
    "falcon-sequential": FALCON_SEQUENTIAL,
    "falcon-alibi": FALCON_SEQUENTIAL,
    "bloom": (("self_attention", "stream"), None),
}


def distance(a, b) -> float:
    return (1 - torch.cosine_similarity(a.double(), b.double(), dim=-1)).mean().item()


def reference(family: str, ids) -> list[tuple[float, float, float]]:
    """Influence of every block, its attention and its MLP, out of one forward of the stock model."""
    model, seen = tiny_model(family), {}
    blocks = next(
        m for name, m in model.get_decoder().named_modules() if name.rpartition(".")[2] in ("layers", "h", "blocks")
    )
    (attention, kind), mlp = HALVES[family]

    def note(key):
        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            seen[key] = output.clone()  # Falcon adds to it in place

        return hook

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda m, args, i=i: seen.update({(i, "before"): args[0].clone()}))
        block.register_forward_hook(note((i, "after")))
        half = block.get_submodule(attention)
        half.register_forward_hook(note((i, "attention")))
        half.register_forward_pre_hook(
            lambda m, args, i=i: seen.update({(i, "behind"): args[0].clone()} if args else {})
        )
        if mlp:
            block.get_submodule(mlp).register_forward_hook(note((i, "mlp")))
    with torch.no_grad():
        model(input_ids=ids)
    found = []
    for i in range(len(blocks)):
        before, after, attention_half = (seen[i, key] for key in ("before", "after", "attention"))
        middle = {"stream": attention_half, "behind": seen.get((i, "behind")), "added": before + attention_half}[kind]
        half = (before, before + seen[i, "mlp"]) if mlp else (middle, after)
        found.append((distance(before, after), distance(before, middle), distance(*half)))
    return found


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_influence_is_that_of_the_stock_model_in_both_halves(family):
    ids = some_ids(4, 16)
    moments = rankfold.calibrate(opened(family), CalibrationData(ids, "random", "random", 0), statistics={"influence"})
    measured = torch.stack([moments[i]["influence"].mean for i in range(3)])
    expected = torch.tensor(reference(family, ids), dtype=torch.float64)
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-6)
