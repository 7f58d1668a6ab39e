"""Does it pay to take dimensions from queries and keys where these are normalised?

A tiny Qwen 3, trained here in seconds on the letters of a text that ships with Python; then compressed at equal numbers
of weights with queries and keys dense, so that MLP, values and output give more, and with rotary pairs taken too. And
where only queries and keys lose something: with the mean square of the norms predicted, with that of what is left, and
with that of the dense model, as if it were known. Calibrated on what it was trained on, evaluated on the last tenth of
the text. A killed run goes on where it was.

    python benchmarks/qk_norm.py
"""

import copy
import itertools
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers as t
from torch import Tensor, nn

import common
from experiment import of_name
from measures import Perplexities
from rankfold import CalibrationData, compress, make_method, open_model
from rankfold.evaluation.perplexity import DEFINITION
from rankfold.modules import PredictedNorm

TEXT = "\n\n".join(topics[key] for key in sorted(topics))
LETTERS = {letter: i for i, letter in enumerate(sorted(set(TEXT)))}
LENGTH, BATCH = 64, 16
EPS = 1e-6  # of the norms
SHAPE = {  # queries wider than the stream, and grouped, as in Qwen3-0.6B
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
FORMS = {"dense": ("mlp", "vo"), "reduced": ("mlp", "qk", "vo")}
METHODS = ("rankfold", "rankfold allow_module_removal=true", "modegpt")
ALONE = (0.25, 0.5)
SPARSITIES = (0.2, 0.3, 0.5)
DEFINITIONS = {
    "perplexity": DEFINITION + "; a token is a letter",
    "nll": "nats per predicted token",
    "parameters": "of the model",
    "ranks": "module -> mean rank over the blocks",
}


def main() -> None:
    parser = common.arguments(__doc__, "qk_norm")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--model", type=Path, default=Path("qk_norm.model"), help="folder the trained model is kept in")
    args = parser.parse_args()
    ids, test = torch.tensor([LETTERS[letter] for letter in TEXT]).tensor_split([len(TEXT) * 9 // 10])
    if not args.model.exists():
        train(ids, args.steps).save_pretrained(args.model)
    source = open_model(t.AutoModelForCausalLM.from_pretrained(args.model), device="cpu")
    source.autocast = None
    tokens = calibration(ids)
    on = Perplexities({"": test[: 256 * LENGTH].view(-1, LENGTH)}, {"": "its last tenth"}, None)
    config = {
        "model": {"name": "qwen3 of letters", "fingerprint": source.fingerprint, "steps": args.steps, **SHAPE},
        "calibration": common.describe_tokens(tokens.ids, tokens.name, 0),
        **on.describe(),
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record:
        record.add("dense", **on(source.model, None), parameters=parameters(source.model))
    for sparsity in ALONE:
        if f"only queries and keys, predicted, {sparsity:.0%}" not in record:  # the last of three
            alone(record, source, tokens, sparsity, on)
    for sparsity, name, form in itertools.product(SPARSITIES, METHODS, FORMS):
        row = f"{name}, queries and keys {form}, {sparsity:.0%}"
        if row in record:
            continue
        plans, (method, options) = [], of_name(name)
        how = make_method(method, sparsity=sparsity, modules=FORMS[form], rank_multiple=2, **options)
        model = compress(source, method=how, calibration=tokens, on_plan=plans.append).model
        facts = {"setting": name, "form": form, "sparsity": sparsity, "ranks": ranks(plans[0])}
        record.add(row, **on(model, None), parameters=parameters(model), **facts)


def alone(record: common.Record, source, tokens: CalibrationData, sparsity: float, on) -> None:
    """One compression of queries and keys, with three things for their norms to divide by."""
    model = compress(
        source, method=make_method("modegpt", modules={"qk": sparsity}, rank_multiple=2), calibration=tokens
    ).model
    facts = {"setting": "only queries and keys", "sparsity": sparsity, "parameters": parameters(model)}
    rows = {"known": lambda m: known(m, source.model), "of what is left": own_mean_squares, "predicted": lambda _: None}
    for form, change in rows.items():
        small = copy.deepcopy(model)
        change(small)
        record.add(f"only queries and keys, {form}, {sparsity:.0%}", **on(small, None), form=form, **facts)


def own_mean_squares(model: nn.Module) -> None:
    for norm in model.modules():
        if isinstance(norm, PredictedNorm):
            norm.root.data.fill_(norm.root.shape[1] ** -0.5)
            norm.floor.data.fill_(EPS**0.5)


def known(model: nn.Module, dense: nn.Module) -> None:
    """Norms divide by what those of the dense projections would, of what enters the attention."""
    for block, whole in zip(model.model.layers, dense.model.layers, strict=True):
        for name in ("q", "k"):
            norm, projection = getattr(block.self_attn, f"{name}_norm"), getattr(whole.self_attn, f"{name}_proj")
            divide = Known(norm.weight, projection)
            setattr(block.self_attn, f"{name}_norm", divide)
            getattr(block.self_attn, f"{name}_proj").register_forward_pre_hook(divide.look)


class Known(nn.Module):
    """A norm of what is left that knows the dense mean square."""

    def __init__(self, weight: Tensor, projection: nn.Linear):
        super().__init__()
        self.weight, self.projection = weight, projection

    def look(self, _, args) -> None:
        heads = self.projection(args[0]).unflatten(-1, (len(self.weight), -1))
        self.mean = heads.square().mean(-1, keepdim=True) + EPS

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(self.mean)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ranks(plan) -> dict[str, float]:
    found: dict[str, list[int]] = {}
    for module in plan.modules:
        found.setdefault(module.module, []).append(module.rank)
    return {name: sum(of) / len(of) for name, of in found.items()}


def calibration(ids: Tensor) -> CalibrationData:
    starts = torch.randint(len(ids) - LENGTH, (288,), generator=torch.Generator().manual_seed(1)).tolist()
    drawn = torch.stack([ids[start : start + LENGTH] for start in starts])
    return CalibrationData(
        drawn[:256].contiguous(), "pydoc topics", "pydoc topics", 0, held_out=drawn[256:].contiguous()
    )


def train(ids: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(t.Qwen3Config(**SHAPE, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            common.say(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


if __name__ == "__main__":
    main()
