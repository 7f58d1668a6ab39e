"""Does it pay to take dimensions from queries and keys where these are normalised?

A small Qwen 3, trained here in minutes on four texts; then compressed at equal numbers of parameters with queries and keys
dense, so that MLP, values and output give more, and with rotary pairs taken too. Calibrated on 64 x 256 tokens of what it was
trained on, evaluated on WikiText-2's test text.

    python benchmarks/qk_norm.py
"""

import itertools
import json
import time
from pathlib import Path

import torch
import transformers as t
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

import common
from rankfold import Tokens, compress, make_method, open_model
from rankfold.evaluation.perplexity import DEFINITION

TEXTS = ("calibration/wiki_demo.txt", "calibration/c4_demo.jsonl", "text/tinystories_val_sample.txt")
TEXTS += ("text/wikitext2-valid.tokens",)
TEST = "text/wikitext2-test.tokens"
LENGTH, BATCH, VOCABULARY = 256, 16, 2048
SHAPE = {  # queries twice as wide as the stream, and grouped, as in Qwen3-0.6B
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FORMS = {"dense": ("mlp", "vo"), "reduced": ("mlp", "qk", "vo")}
METHODS = {
    "rankfold": ("rankfold", {}),
    "rankfold allocation=uniform": ("rankfold", {"allocation": "uniform"}),
    "modegpt": ("modegpt", {}),
}
SPARSITIES = (0.2, 0.3, 0.5)
DEFINITIONS = {
    "perplexity": DEFINITION,
    "nll": "nats per predicted token",
    "parameters": "of the model",
    "ranks": "module -> mean rank over the blocks",
}


def main() -> None:
    parser = common.arguments(__doc__, "qk_norm")
    common.add_data(parser)
    parser.add_argument("--steps", type=int, default=800, help="of training")
    parser.add_argument("--model", type=Path, default=Path("qk_norm.model"), help="folder the trained model is kept in")
    args = parser.parse_args()
    ids, test = encoded(args)
    if not args.model.exists():
        train(ids, args.steps).save_pretrained(args.model)
    source = open_model(t.AutoModelForCausalLM.from_pretrained(args.model), device="cpu")
    tokens = calibration(ids)
    on = common.Evaluation(test[: len(test) // LENGTH * LENGTH].view(-1, LENGTH)[::9], None)
    config = {
        "model": {"name": "qwen3 trained here", **SHAPE, "vocab_size": VOCABULARY, "steps": args.steps},
        "fingerprint": source.fingerprint,
        "precision": common.precision(source),
        "calibration": common.describe_tokens(tokens.ids, "training text", 0),
        "evaluation": common.describe_tokens(on.windows, Path(TEST).name),
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record:
        common.add_perplexity(record, "dense", source.model, on, parameters=parameters(source.model))
    for sparsity, (name, (method, options)), (form, modules) in itertools.product(
        SPARSITIES, METHODS.items(), FORMS.items()
    ):
        row = f"{name}, queries and keys {form}, {sparsity:.0%}"
        if row not in record:
            plans = []
            how = make_method(method, sparsity=sparsity, modules=modules, multiple=4, **options)
            model = compress(source, how, tokens, on_plan=plans.append)
            facts = {"setting": name, "form": form, "sparsity": sparsity, "ranks": ranks(plans[0])}
            common.add_perplexity(record, row, model, on, parameters=parameters(model), **facts)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ranks(plan) -> dict[str, float]:
    found: dict[str, list[int]] = {}
    for module in plan.modules:
        found.setdefault(module.module, []).append(module.rank)
    return {name: sum(of) / len(of) for name, of in found.items()}


def encoded(args) -> tuple[Tensor, Tensor]:
    """Ids of what is trained on and of what is evaluated on, by a tokenizer made of the first."""
    texts = [read(common.data_file(args.data, name)) for name in TEXTS]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    test = read(common.data_file(args.data, TEST))
    return tuple(torch.tensor(tokenizer.encode(text).ids) for text in ("\n".join(texts), test))


def read(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return "\n".join(json.loads(line)["text"] for line in text.splitlines()) if path.suffix == ".jsonl" else text


def calibration(ids: Tensor) -> Tokens:
    starts = torch.randint(len(ids) - LENGTH, (72,), generator=torch.Generator().manual_seed(1)).tolist()
    drawn = torch.stack([ids[start : start + LENGTH] for start in starts])
    return Tokens(drawn[:64].contiguous(), "training text", "training text", 0, held_out=drawn[64:].contiguous())


def train(ids: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    config = t.Qwen3Config(**SHAPE, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    model = t.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
    generator, begin = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            common.say(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s")
    return model.eval()


if __name__ == "__main__":
    main()
