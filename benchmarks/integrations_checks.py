"""One program on one compressed model or export, in the program's own environment; see integrations.py, which runs it.

python benchmarks/integrations_checks.py PROGRAM FOLDER COMPRESSED IDS.json OUT.json
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import rankfold

PROMPT_LENGTHS = (3, 17, 40, 9, 64)
NEW = 16


def main(program: str, folder: str, small: str, ids: str, out: str) -> None:
    tokens = torch.tensor(json.loads(Path(ids).read_text(encoding="utf-8")))
    facts = CHECKS[program](Path(folder), Path(small), tokens)
    Path(out).write_text(json.dumps(facts), encoding="utf-8")


@torch.no_grad()
def logits(model, ids):
    return model.eval()(ids[:1]).logits.double()


def change(after, before) -> float:
    return ((after - before).norm() / before.norm()).item()


def linear_layers(model) -> list[str]:
    """In the blocks; the head is left out by most programs."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name]


def adapt(folder: Path, _, ids) -> dict:
    from peft import LoraConfig, get_peft_model

    model = rankfold.load(folder, device="cpu")
    layers = linear_layers(model)
    tuned = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM"))
    reached = {name.removeprefix("base_model.model.") for name, m in tuned.named_modules() if hasattr(m, "lora_A")}
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(5):
        loss = tuned(ids[:1, :256], labels=ids[:1, :256]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapted = logits(tuned, ids)
    merged = logits(tuned.merge_and_unload(), ids)
    taken = f"{len(reached & set(layers))} of {len(layers)}"
    return {"reached": taken, "losses": [losses[0], losses[-1]], "change": change(merged, adapted)}


def quantise(folder: Path, _, ids) -> dict:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = rankfold.load(folder, device="cpu")
    layers, before = linear_layers(model), logits(model, ids)
    quantize_(model, Int8WeightOnlyConfig())
    taken = sum(type(model.get_submodule(name).weight) is not nn.Parameter for name in layers)
    return {"reached": f"{taken} of {len(layers)}", "change": change(logits(model, ids), before)}


def quantise_again(folder: Path, _, ids) -> dict:
    """llm-compressor's one shot without data: weights in 8 bits, activations rounded as they come."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = rankfold.load(folder, dtype="float32", device="cpu")
    layers, before = linear_layers(model), logits(model, ids)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]))
    taken = sum(getattr(model.get_submodule(name), "quantization_scheme", None) is not None for name in layers)
    return {"reached": f"{taken} of {len(layers)}", "change": change(logits(model, ids), before)}


def evaluate(folder: Path, _, ids) -> dict:
    """lm-eval's own class for transformers models, which is given the folder and trusts its code; without rankfold."""
    code = """
import json, sys
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=sys.argv[1], trust_remote_code=True, device="cpu", dtype="float32")
assert "rankfold" not in sys.modules
import torch
ids = torch.tensor(json.loads(sys.argv[2]))
torch.save(model._model_call(ids), sys.argv[3])
"""
    window, place = ids[:1, :256], folder.with_name("logits.pt")
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(window.tolist()), str(place)], check=True)
    ours = logits(rankfold.load(folder, dtype="float32", device="cpu"), window)
    return {"change": change(torch.load(place).double(), ours)}


def serve(folder: Path, small: Path, ids) -> dict:
    prompts = [ids[k % len(ids), :length].tolist() for k, length in enumerate(PROMPT_LENGTHS)]
    model = rankfold.load(small, dtype="float32", device="cpu")
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in prompts]
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dense = 2 * 4 * width * config.num_key_value_heads * config.num_hidden_layers
    script, out = Path(__file__).parents[1] / "tests" / "e2e" / "vllm_engine.py", folder.with_name("engine.json")
    trust = ["trust"] if (folder / "configuration_decilm.py").exists() else []
    arguments = (sys.executable, script, folder, out, json.dumps(prompts), NEW, *trust)
    subprocess.run([*map(str, arguments)], check=True, env=os.environ)
    found = json.loads(out.read_text(encoding="utf-8"))
    equal = sum(a == b for a, b in zip(found["tokens"], wanted, strict=True))
    cache = f"{sum(found['cache_bytes_per_token']):,} (dense: {dense:,})"
    return {"equal": f"{equal} of {len(prompts)}", "cache_bytes_per_token": cache}


CHECKS = {
    "peft": adapt,
    "torchao": quantise,
    "lm_eval": evaluate,
    "llmcompressor": quantise_again,
    "vllm": serve,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
