"""Tiny models with trained weights: what random weights cannot show is how much a compression hurts.

Trained in the test session on text that ships with Python, one model a session (workers share it on disk), in seconds.
"""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers as t
from filelock import FileLock
from torch import Tensor, nn

from activations import DOWN, OUTPUT, UP, blocks_of, look, member
from rankfold import CalibrationData

WINDOW, BATCH = 64, 16
WIDTH = 16  # of a head
MASSIVE = 30.0  # size of planted activations; those of the model are below one
TEXT = "\n\n".join(topics[key] for key in sorted(topics))
CHARACTERS = {character: i for i, character in enumerate(sorted(set(TEXT)))}
SHAPE = {
    "vocab_size": len(CHARACTERS),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {  # config, training steps
    # Llama's block with biases on q, k, v; frequencies so low that a bias on the slowest pairs hardly turns.
    "qwen2": (t.Qwen2Config, {"num_key_value_heads": 2, "intermediate_size": 96, "rope_theta": 1e6}, 500),
    "opt": (t.OPTConfig, {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}, 900),
}
# Not among those that every test of quality runs on.
EXPERTS = {
    "mixtral": (
        t.MixtralConfig,
        {
            **{"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 48},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
        300,
    )
}


@functools.cache
def encoded() -> tuple[Tensor, Tensor]:
    """Ids of the text: nine tenths to train and calibrate on, the rest held out."""
    ids = torch.tensor([CHARACTERS[character] for character in TEXT])
    return ids.tensor_split([len(ids) * 9 // 10])


def unigram_perplexity() -> float:
    """Of the held-out text under the frequencies of characters: what a model must beat by far."""
    train, held_out = encoded()
    counts = train.bincount(minlength=len(CHARACTERS)) + 1.0
    return (-(counts / counts.sum()).log()[held_out].mean()).exp().item()


def calibration() -> CalibrationData:
    ids = torch.stack([encoded()[0][start : start + WINDOW] for start in range(0, 128 * 3000, 3000)])
    return CalibrationData(ids, "pydoc topics", "pydoc topics", 0)


def with_held_out(tokens: CalibrationData) -> CalibrationData:
    """The last eighth of the windows not fitted."""
    fit = len(tokens.ids) * 7 // 8
    return replace(tokens, ids=tokens.ids[:fit].contiguous(), held_out=tokens.ids[fit:].contiguous())


def held_out_windows() -> Tensor:
    held_out = encoded()[1]
    return held_out[: 256 * WINDOW].view(-1, WINDOW)


def train(name: str) -> nn.Module:
    cls, options, steps = (MODELS | EXPERTS)[name]
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(cls(**SHAPE | options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    ids, generator = encoded()[0], torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator)
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def trained(name: str, shared: Path) -> nn.Module:
    """The model, from ``shared`` where another worker has trained it."""
    folder = shared / f"trained-{name}"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            train(name).save_pretrained(folder)
    return t.AutoModelForCausalLM.from_pretrained(folder).eval()


# ---------------------------------------------------------------------------------------------------------------------
# The same function in weights that are harder to compress


@torch.no_grad()
def with_collinear_units(model: nn.Module, *, copies: int = 6, silent: int = 8) -> nn.Module:
    """Every MLP wider and doing the same.

    The half of its units that send most come in ``copies`` of nearly the same size, whose outputs add up to theirs. And
    ``silent`` units, massive on the first token of a window, cancel each other.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    wide = "ffn_dim" if hasattr(config, "ffn_dim") else "intermediate_size"
    split = getattr(config, wide) // 2
    setattr(config, wide, getattr(config, wide) + split * (copies - 1) + silent)
    result = t.AutoModelForCausalLM.from_config(config).eval()
    state = model.state_dict()
    generator = torch.Generator().manual_seed(0)
    for index, block in enumerate(blocks_of(model)):
        hidden, down = look(model, calibration().ids, index).hidden, member(block, DOWN)
        sent = hidden.square().mean(0) * down.weight.square().sum(0)
        units, chosen = torch.arange(len(sent)), sent.topk(split).indices
        units = torch.cat([units, chosen.repeat(copies - 1)])
        size = torch.ones(len(units)).index_fill(0, chosen, 1.0)
        size[len(sent) :] += torch.rand(len(units) - len(sent), generator=generator) / 10
        share = torch.ones(len(sent)).index_fill(0, chosen, 1 / copies)[units] / size
        first = first_token_direction(model, index)
        for name, module in block.named_modules():
            prefix = next(key for key, value in model.named_modules() if value is module)
            if module is down:
                cancelling = torch.randn(len(down.weight), silent, generator=generator)
                cancelling -= cancelling.mean(1, keepdim=True)
                state[f"{prefix}.weight"] = torch.cat([down.weight[:, units] * share, cancelling], 1)
            elif module is member(block, UP):
                rows = torch.cat([module.weight[units] * size[:, None], MASSIVE * first.expand(silent, -1)])
                state[f"{prefix}.weight"] = rows
                if module.bias is not None:
                    state[f"{prefix}.bias"] = torch.cat([module.bias[units] * size, torch.zeros(silent)])
            elif name == "mlp.gate_proj":
                state[f"{prefix}.weight"] = torch.cat([module.weight[units], first.expand(silent, -1)])
    result.load_state_dict(state)
    return result


@torch.no_grad()
def first_token_direction(model: nn.Module, index: int) -> Tensor:
    """``(D,)`` what, multiplied with the input of the MLP, is one on first tokens and as small as can be elsewhere."""
    seen = []
    hook = member(blocks_of(model)[index], UP).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(calibration().ids, use_cache=False)
    hook.remove()
    x = seen[0].view(-1, WINDOW, seen[0].shape[-1])
    first = x[:, 0].mean(0)
    direction = torch.linalg.solve(x.flatten(0, 1).T @ x.flatten(0, 1), first)
    return direction / (direction @ first)


@torch.no_grad()
def with_biased_keys(model: nn.Module, size: float = 50.0) -> nn.Module:
    """A constant in some dimensions of every key: the same for all keys, so that softmax does not see it.

    Rotary embedding turns it with the position, so there it goes to the slowest pairs.
    """
    result, rotary = copy.deepcopy(model), model.config.model_type == "qwen2"
    for block in blocks_of(result):
        heads = block.self_attn.k_proj.bias.view(-1, WIDTH)
        where = [WIDTH // 2 - 2, WIDTH // 2 - 1, WIDTH - 2, WIDTH - 1] if rotary else range(WIDTH // 2)
        heads[:, list(where)] += size
    return result


@torch.no_grad()
def with_scaled_values(model: nn.Module) -> nn.Module:
    """Values of very different size, taken back by the output projection."""
    result = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for block in blocks_of(result):
        v, o = block.self_attn.v_proj, member(block.self_attn, OUTPUT)
        size = 30 ** torch.rand(len(v.weight), generator=generator)
        v.weight.mul_(size[:, None])
        v.bias.mul_(size)
        groups = o.weight.shape[1] // len(v.weight)
        o.weight.div_(size.view(-1, WIDTH).repeat_interleave(groups, 0).flatten())  # once for every query head
    return result
