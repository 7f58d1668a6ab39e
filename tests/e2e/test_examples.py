"""The scripts in ``examples`` run from end to end, where what they need is installed."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as t

from saved import save_text, save_tiny
from warm import python

EXAMPLES = Path(__file__).parents[2] / "examples"
HURRY = "from few_probe_texts import score_few; score_few()\n"
SCRIPT = HURRY + "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
NEEDS = {
    "lora_to_llama_cpp": "peft",
    "compress_to_vllm": "vllm",
    "recover_to_gguf": "rankfold",
    "own_data": "rankfold",
    "model_in_memory": "rankfold",
}


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
    if name == "own_data":
        lines = [json.dumps({"text": part}) for part in text.read_text(encoding="utf-8").split("\n\n")]
        text = folder / "rows.jsonl"
        text.write_text("\n".join(lines), encoding="utf-8")
    t.LlamaForCausalLM(config).save_pretrained(model)
    settings = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    sizes = ("--num-samples", 8, "--max-length", 32, *arguments)
    done = python(SCRIPT, *map(str, (EXAMPLES / f"{name}.py", model, text, output, *sizes)), env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lora_to_llama_cpp(tmp_path):
    printed = run("lora_to_llama_cpp", tmp_path, tmp_path / "small.gguf", "--steps", 8, "--lr", 1e-2)
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 8 and sum(losses[4:]) < sum(losses[:4])
    assert (tmp_path / "small.gguf").stat().st_size > 0


def test_compress_to_vllm(tmp_path):
    assert "The capital of France is" in run("compress_to_vllm", tmp_path, tmp_path / "small")


def test_recover_to_gguf(tmp_path):
    file = tmp_path / "small.gguf"
    printed = run("recover_to_gguf", tmp_path, file, "--tokens", 256)
    dense, before, after = map(float, re.search(r"dense (\S+), (\S+) -> (\S+)", printed).groups())
    assert dense > 0 and after <= before * 1.02 and file.stat().st_size > 0
    exported, stock, compressed = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{6,}", printed.splitlines()[-1]))
    assert compressed <= exported < stock


def test_own_data(tmp_path):
    printed = run("own_data", tmp_path, tmp_path / "small")
    dense, small = (float(line.rpartition(" ")[2]) for line in printed.splitlines() if "unseen rows" in line)
    assert dense > 1 and small > 1 and dense != small and (tmp_path / "small" / "rankfold.json").exists()


def test_model_in_memory(tmp_path):
    printed = run("model_in_memory", tmp_path, tmp_path / "small")
    dense, small = (int(n.replace(",", "")) for n in re.findall(r"^\w+, ([\d,]+) parameters: The cap", printed, re.M))
    assert small < dense and (tmp_path / "small" / "config.json").exists()


def test_the_notebook(tmp_path):
    """Its cells of code, one after the other, on a tiny model; the cell that installs is left out."""
    cells = json.loads((EXAMPLES / "rankfold.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in codes)
    model, text = save_tiny(tmp_path / "model", blocks=2), save_text(tmp_path / "text.txt")
    tiny = f"MODEL, TEXT, SAMPLES, LENGTH, TRAINING_TOKENS = {str(model)!r}, {str(text)!r}, 8, 32, 256"
    lines = [tiny if "parameters" in cell["metadata"].get("tags", ()) else "".join(cell["source"]) for cell in codes]
    done = python(HURRY + "\n".join(line for line in lines if not line.startswith("%")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    planned, loaded = (re.findall(r"([\d,]+) parameters$", done.stdout, re.M)[end] for end in (0, -1))
    assert planned == loaded and "compressed: The capital of France is" in done.stdout
