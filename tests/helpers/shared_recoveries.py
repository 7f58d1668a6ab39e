"""Recoveries that several processes share: what is trained, and what runs in each process."""

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers as t

import rankfold
from few_probe_texts import score_few
from rankfold._utils.files import write_text
from rankfold._utils.processes import joined
from rankfold.recovery import training, whole
from saved import save_tiny
from shared_runs import end_if_writing

WORKER = "import sys, shared_recoveries; shared_recoveries.work(sys.argv[1], sys.argv[2:])"
STEPS, SCORES = 12, 4
SIZES: dict[str, Any] = {"tokens": STEPS * 256, "max_length": 32, "batch_tokens": 256, "lr": 1e-3, "device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"tune": "lora"},
    "adapter": {"tune": "lora", "adapter": True},
    "norms": {"tune": "norms", "gradient_checkpointing": True},
    "cached": {"cache_logits": "cache"},
    "sparse": {"loss": "both"},
    "experts": {},
}
OWN = ("sparse", "experts")  # cases with models of their own


def save_all(place: Path) -> None:
    """Write a dense model, one that has lost some of it, and a text."""
    save_tiny(place / "dense", blocks=2)
    model = rankfold.load(place / "dense", device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(place / "small")
    write_text(place / "text.txt", "\n\n".join(topics.values())[:60_000])


def save_own(place: Path, name: str) -> None:
    """Write the models of a case that has its own: with zeros on purpose, or with experts that a router chooses."""
    (place / name).mkdir()
    if name == "experts":
        shutil.copytree(place / "dense", place / name / "dense")
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = t.MixtralConfig(
            **sizes, num_key_value_heads=2, vocab_size=400, num_local_experts=4, num_experts_per_tok=1
        )
        model = t.MixtralForCausalLM(config)
        for parameter in filter(lambda parameter: parameter.dim() > 1, model.parameters()):
            torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(place / name / "dense")
    source = rankfold.open_model(place / name / "dense" if name == "experts" else place / "dense", device="cpu")
    method = rankfold.LatentLLM(sparsity=0.3) if name == "experts" else rankfold.make_method("wanda")
    data = rankfold.load_calibration(place / "text.txt", source, num_samples=16, max_length=32)
    rankfold.compress(source, method=method, calibration=data, output=place / name / "small")


def recover(place: Path, name: str, output: Path) -> rankfold.RecoveryResult:
    """Train as a case says, from the models in a folder; those of a case of their own have its name."""
    own, options = place / name, SIZES | CASES[name]
    small, dense = (folder if folder.exists() else place / folder.name for folder in (own / "small", own / "dense"))
    if "cache_logits" in options:
        options["cache_logits"] = output.parent / "cache"
    return rankfold.recover(small, dense, calibration=place / "text.txt", output=output, **options)


def prepare() -> None:
    """Train in fp32 on any machine, and score a few times."""
    torch.set_num_threads(1)
    score_few()
    whole.SCORES = SCORES
    for module in (training, whole):
        module.trains_in_bf16 = lambda device: False


def work(folder: str, names: list[str]) -> None:
    """Train in turn, in one of several processes or alone; only the first may write."""
    prepare()
    if os.environ.get("RANK", "0") != "0":
        sys.addaudithook(partial(end_if_writing, folder))
    with joined():
        for name in names:
            recover(Path(folder).parent, name, Path(folder, name))
