"""The scripts in ``examples`` run from end to end, where what they need is installed."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as t

from saved import save_text, save_tiny
from warm import python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
NEEDS = {"lora_to_llama_cpp": "peft", "compress_to_vllm": "vllm"}


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NEEDS.keys()


def run(name: str, folder: Path, output: Path, *arguments) -> str:
    """What the script prints, on a small model as wide as engines want."""
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.LlamaConfig(**sizes, head_dim=64, vocab_size=400, max_position_embeddings=128)
    model, text = save_tiny(folder / "model"), save_text(folder / "text.txt")
    t.LlamaForCausalLM(config).save_pretrained(model)
    settings = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    sizes = ("--num-samples", 8, "--max-length", 32, *arguments)
    done = python(SCRIPT, *map(str, (EXAMPLES / f"{name}.py", model, text, output, *sizes)), env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lora_to_llama_cpp(tmp_path):
    printed = run("lora_to_llama_cpp", tmp_path, tmp_path / "small.gguf", "--steps", 8, "--lr", 1e-2)
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert (tmp_path / "small.gguf").stat().st_size > 0


def test_compress_to_vllm(tmp_path):
    assert "The capital of France is" in run("compress_to_vllm", tmp_path, tmp_path / "small")
