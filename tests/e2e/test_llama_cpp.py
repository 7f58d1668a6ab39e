"""GGUF files in llama.cpp itself, where a wheel of it is installed (`pip install xllamacpp`; nothing else needs it)."""

import json
import socket
import subprocess
import sys
from importlib.util import find_spec

import gguf
import pytest
import torch

import rankfold
from families import tokens
from rankfold.checkpoint.load import load_tokenizer
from saved import save_text, save_tiny, save_tokenizer_over_characters

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp here: pip install xllamacpp")

SHORT = {"num_samples": 8, "max_length": 32, "device": "cpu"}
TEXTS = ("The class of integers", "if x is 12 + 345 then:\n\tit's <s>")
SERVE = """
import json, sys, urllib.request
import xllamacpp
file, port, texts, count = json.loads(sys.argv[1])
settings = xllamacpp.CommonParams()
settings.model.path, settings.port, settings.n_ctx = file, port, 128
settings.cpuparams.n_threads, settings.n_gpu_layers, settings.warmup = 1, 0, False
server = xllamacpp.Server(settings)

def ask(path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["tokens"]

greedy = {"n_predict": count, "temperature": 0, "return_tokens": True, "cache_prompt": False}
ids = [ask("/tokenize", content=text, add_special=True, parse_special=True) for text in texts]
print("RESULT " + json.dumps([ids, [ask("/completion", prompt=prompt, **greedy) for prompt in ids]]))
"""


def in_llama_cpp(file, count: int):
    """Ids of the texts, and what follows them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = json.dumps([str(file), port, TEXTS, count])
    done = subprocess.run([sys.executable, "-c", SERVE, arguments], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    return json.loads(line.removeprefix("RESULT "))


BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


SHAPES = [("gguf", {}), ("gguf-deci", {"exclude_blocks": (1,)}), ("gguf-deci", {"head_dim": 6, "allocation": "owl"})]
QWEN3 = {"family": "qwen3", "head_dim": 12, "tie_word_embeddings": True}
GEMMA3 = {"family": "gemma3_text", "blocks": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
STRETCHED = {  # as Gemma 3 does from 4B on, and not at the base that transformers takes by itself
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}


@pytest.mark.parametrize("kind, shape", SHAPES)
@pytest.mark.parametrize("options, characters", [({}, False), (BIASED, False), ({}, True)])
def test_llama_cpp_writes_the_same_tokens(kind, shape, options, characters, tmp_path):
    save_tiny(tmp_path / "model", blocks=3, **options)
    if characters:
        save_tokenizer_over_characters(tmp_path / "model")
    assert_same_tokens(kind, shape, tmp_path)


@pytest.mark.parametrize(
    "kind, shape, options, arch",
    [
        *((kind, shape, {"family": "qwen2"}, "deci" if "deci" in kind else "qwen2") for kind, shape in SHAPES),
        ("gguf-deci", {}, {"family": "qwen2", "tie_word_embeddings": True}, "qwen2"),  # all MLPs are equally wide
        ("gguf", {}, QWEN3, "qwen3"),
        ("gguf", {}, GEMMA3, "gemma3"),
        ("gguf", {}, GEMMA3 | {"rope_parameters": STRETCHED}, "gemma3"),
    ],
)
def test_llama_cpp_writes_the_same_tokens_in_other_families(kind, shape, options, arch, tmp_path):
    save_tiny(tmp_path / "model", **{"blocks": 3} | options)
    assert_same_tokens(kind, shape, tmp_path)
    assert gguf.GGUFReader(tmp_path / "x.gguf").fields["general.architecture"].contents() == arch


def assert_same_tokens(kind, shape, tmp_path):
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    method = rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2, **shape)
    rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "small", mode="one-pass")
    assert_export_writes_the_same(tmp_path / "small", kind, tmp_path / "x.gguf")


def test_llama_cpp_cuts_text_as_gemma_does(tmp_path):
    save_tiny(tmp_path / "model", **GEMMA3)
    save_tokenizer_over_characters(tmp_path / "model", splits=True)
    assert_export_writes_the_same(tmp_path / "model", "gguf", tmp_path / "x.gguf")


def test_llama_cpp_writes_the_same_tokens_of_a_recovered_model(tmp_path):
    save_tiny(tmp_path / "model", blocks=3)
    save_text(tmp_path / "text.txt")
    text = str(tmp_path / "text.txt")
    method = rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2)
    rankfold.compress(tmp_path / "model", method=method, calibration=text, output=tmp_path / "small", **SHORT)
    better = tmp_path / "better"
    how = {"tune": "all", "tokens": 8192, "batch_tokens": 256, "lr": 1e-3, "max_length": 32}  # gains in bf16 too
    result = rankfold.recover(tmp_path / "small", tmp_path / "model", calibration=text, output=better, **how)
    assert result.record["recovery"]["recovered"]
    assert not torch.equal(*(rankfold.load(f, device="cpu").model.norm.weight for f in (better, tmp_path / "small")))
    assert_export_writes_the_same(better, "gguf-deci", tmp_path / "x.gguf")


@torch.no_grad()
def assert_export_writes_the_same(small, kind, file):
    """Every token is the best one in transformers too, or as good as it: llama.cpp caches keys and values in fp16."""
    rankfold.export(small, file, kind, dtype="float32")
    ids, written = in_llama_cpp(file, 24)
    tokenizer, model = load_tokenizer(small), rankfold.load(small, device="cpu")
    assert ids == [tokenizer(text).input_ids for text in TEXTS]
    for prompt, found in zip(ids, written, strict=True):
        found = [token for token in found if token != tokenizer.eos_token_id]
        assert len(found) > 1
        found += [tokenizer.eos_token_id] if len(found) < 24 else []
        logits = model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.01
