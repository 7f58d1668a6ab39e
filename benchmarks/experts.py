"""What experts should be fitted to: their own tokens, weighted by the router, and others where these are few.

A small Mixtral is trained on text that ships with Python, in seconds; its router sends some experts thousands of tokens
and others a handful. Half of every expert's units go, nothing else does. Perplexity is on text it has not seen, mean
over draws of the calibration windows.

    python benchmarks/experts.py
"""

import statistics
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor, nn

import common
from rankfold import CalibrationData, MoDeGPT, MomentStore, calibrate, compress, open_model, perplexity
from rankfold.calibration import experts as shipped
from rankfold.calibration.moments import Moment

WINDOW, BATCH, STEPS, RATE = 64, 16, 300, 4e-3
SHAPE = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128}
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
SPARSITY, WINDOWS, SEEDS = 0.5, (128, 16, 8), (0, 1)
FILLS = (2, 4, 8)
DEFINITIONS = {
    "perplexity": "of characters, on 64 windows of 64 held-out characters; mean over draws of the calibration windows",
    "windows": "of 64 characters that experts are fitted to",
    "fewest": "tokens that an expert saw, mean over draws",
    "filled n": "own tokens, weighted; where they are fewer than n a hidden unit, others up to that; 4 is shipped",
    "unweighted": "own tokens, each counting alike",
    "pooled": "all tokens for every expert, each counting alike",
    "none": "no moments: the identity in their place",
}


def main() -> None:
    args = common.arguments(__doc__, "experts").parse_args()
    text = "\n\n".join(topics[key] for key in sorted(topics))
    order = {character: i for i, character in enumerate(sorted(set(text)))}
    fit, held_out = torch.tensor([order[character] for character in text]).tensor_split([len(text) * 9 // 10])
    evaluation = held_out[: 64 * WINDOW].view(-1, WINDOW)
    source = open_model(train(fit, len(order)), device="cpu")
    source.autocast = None
    config = {"shape": SHAPE, "steps": STEPS, "sparsity": SPARSITY, "seeds": SEEDS, "text": "pydoc topics"}
    record = common.Record(args.json, config, DEFINITIONS)
    record.add("dense", perplexity=perplexity(source.model, evaluation)["perplexity"])
    for windows in WINDOWS:
        draws = [calibrate(source, drawn(fit, windows, seed)) for seed in SEEDS]
        fewest = statistics.mean(int(sent(draw, i).min()) for draw in draws for i in range(len(source)))
        for name, change in arms().items():
            found = [perplexity(compressed(source, draw, change), evaluation)["perplexity"] for draw in draws]
            record.add(name, windows=windows, fewest=fewest, perplexity=statistics.mean(found), each=found)
            common.say(f"{windows} windows, {name}: {statistics.mean(found):.4f}")


def train(ids: Tensor, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=vocabulary, **SHAPE, **IDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator)
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        logits = model(batch, use_cache=False).logits[:, :-1]
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def drawn(ids: Tensor, windows: int, seed: int) -> CalibrationData:
    starts = torch.randint(len(ids) - WINDOW, (windows,), generator=torch.Generator().manual_seed(100 + seed))
    return CalibrationData(torch.stack([ids[s : s + WINDOW] for s in starts]), "pydoc topics", "pydoc topics", seed)


def sent(moments: MomentStore, index: int) -> Tensor:
    """``(E,)`` tokens of each expert."""
    return (moments[index][shipped.ROUTING].rows > 0).sum(0)


def arms() -> dict:
    """Name -> (tokens a unit, what becomes of the router's weights, whether moments are looked at)."""
    found = {f"filled {fill}": (fill, lambda rows: rows, True) for fill in FILLS}
    found["unweighted"] = (shipped.PER_UNIT, lambda rows: (rows > 0).float(), True)
    found["pooled"] = (shipped.PER_UNIT, torch.ones_like, True)
    return found | {"none": (shipped.PER_UNIT, lambda rows: rows, False)}


def compressed(source, moments: MomentStore, arm: tuple) -> nn.Module:
    fill, change, looks = arm
    store, measured, usual = MomentStore(moments.identity), shipped.RoutedTokens._moment, shipped.PER_UNIT
    for index in range(len(source)):
        routing = moments[index][shipped.ROUTING]
        changed = Moment(routing.count, None, None, None, change(routing.rows))
        store[index] = moments[index] | {shipped.ROUTING: changed}

    def blind(*args) -> Moment:
        moment = measured(*args)
        return Moment(moment.count, moment.total, None, torch.eye(len(moment.total), dtype=torch.float64))

    shipped.PER_UNIT, shipped.RoutedTokens._moment = fill, measured if looks else blind
    try:
        return compress(source, method=MoDeGPT(modules={"experts": SPARSITY}), moments=store).model
    finally:
        shipped.PER_UNIT, shipped.RoutedTokens._moment = usual, measured


if __name__ == "__main__":
    main()
