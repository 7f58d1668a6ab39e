"""Whether experts should become narrower, be removed, or both, as a measured allocation chooses.

Two small Mixtrals are trained on text that ships with Python, the topics of its help and the source of its library: one
with the loss that balances the load of experts, one without, whose router leaves many nearly idle. Perplexity is on
text of both kinds that they have not seen.

    python benchmarks/fewer_experts.py
"""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import common
from rankfold import CalibrationData, MoDeGPT, Rankfold, compress, make_method, open_model, perplexity

WINDOW, BATCH, STEPS, RATE = 128, 16, 1200, 3e-3
SHAPE = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "num_local_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 256}
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
BALANCES = {"balanced": 0.02, "free": 0.0}  # model -> how much the loss of the router counts
CALIBRATED = {"both": (0.1, 0.2, 0.3, 0.4, 0.5), "source": (0.3, 0.5)}  # on which kinds of text -> sparsities
WINDOWS, SOURCE = 128, 1_200_000
DEFINITIONS = {
    "perplexity": "of characters, on 64 windows of 128 held-out characters of each kind of text",
    "calibrated": "on 128 windows of 128 characters of this kind, or of both",
    "kept": "experts that stay in every block",
    "balanced": "trained with the loss that balances the load of experts",
    "free": "trained without it: the router leaves many experts nearly idle",
    "reap": "experts are removed, nothing else",
    "modegpt": "experts and attention become narrower, uniformly",
    "rankfold": "experts and attention become narrower, by a measured allocation",
    "rankfold, experts may go": "the same, and the allocation chooses how many experts stay: allow_expert_removal",
}


def main() -> None:
    args = common.arguments(__doc__, "fewer_experts").parse_args()
    texts = {name: text.encode("ascii", "ignore").decode() for name, text in read_texts().items()}
    order = {character: i for i, character in enumerate(sorted(set("".join(texts.values()))))}
    ids = {
        name: torch.tensor([order[c] for c in text]).tensor_split([len(text) * 9 // 10]) for name, text in texts.items()
    }
    fit, held_out = ({name: parts[part] for name, parts in ids.items()} for part in (0, 1))
    evaluation = {name: drawn(some, 64, 1) for name, some in held_out.items()}
    calibrations = {"both": calibration(fit, "both"), "source": calibration({"source": fit["source"]}, "source")}
    config = {"shape": SHAPE, "steps": STEPS, "texts": {name: len(text) for name, text in texts.items()}}
    record = common.Record(args.json, config, DEFINITIONS)

    def found(model) -> dict[str, float]:
        return {name: perplexity(model, some)["perplexity"] for name, some in evaluation.items()}

    for name, balance in BALANCES.items():
        source = open_model(train(fit, len(order), balance), device="cpu")
        source.autocast = None
        record.add(name, model=name, setting="dense", sparsity=0.0, perplexity=found(source.model))
        runs = [(text, sparsity) for text, sparsities in CALIBRATED.items() for sparsity in sparsities]
        for text, sparsity in runs:
            for setting, method in methods(sparsity).items():
                result = compress(source, method=method, calibration=calibrations[text])
                kept = {module.rank for module in result.plan.modules if module.module == "expert_count"}
                row = {"model": name, "calibrated": text, "setting": setting, "sparsity": sparsity}
                row |= {"perplexity": found(result.model), "kept": max(kept, default=SHAPE["num_local_experts"])}
                record.add(f"{name}, {text}, {setting} {sparsity}", **row)
                common.say(f"{name}, {text}, {setting} {sparsity}: {row['perplexity']}")


def calibration(texts: dict[str, Tensor], name: str) -> CalibrationData:
    """Draw as many windows of every text, and an eighth as many that are not fitted."""
    fit, held_out = (
        torch.cat([drawn(some, windows // len(texts), seed) for some in texts.values()])
        for windows, seed in ((WINDOWS, 7), (WINDOWS // 8, 8))
    )
    return CalibrationData(fit, name, name, 7, held_out=held_out)


def read_texts() -> dict[str, str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    source = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    return {"topics": "\n\n".join(topics[key] for key in sorted(topics)), "source": source[:SOURCE]}


def methods(sparsity: float) -> dict:
    return {
        "reap": make_method("reap", sparsity=sparsity),
        "modegpt": MoDeGPT(sparsity=sparsity),
        "rankfold": Rankfold(sparsity=sparsity),
        "rankfold, experts may go": Rankfold(sparsity=sparsity, allow_expert_removal=True),
    }


def train(fit: dict[str, Tensor], vocabulary: int, balance: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=vocabulary, **SHAPE, **IDS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        parts = enumerate(fit.values())
        batch = torch.cat([drawn(some, BATCH // len(fit), len(fit) * step + n) for n, some in parts])
        found = model(batch, use_cache=False, output_router_logits=True)
        loss = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        load = load_balancing_loss_func(found.router_logits, SHAPE["num_local_experts"], SHAPE["num_experts_per_tok"])
        optimizer.zero_grad()
        (loss + balance * load).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def drawn(ids: Tensor, windows: int, seed: int) -> Tensor:
    starts = torch.randint(len(ids) - WINDOW, (windows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids[start : start + WINDOW] for start in starts])


if __name__ == "__main__":
    main()
