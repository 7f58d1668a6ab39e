"""Rows of a comparison as they are written, made up: names that break what does not escape them, long ones, many."""

NASTY = '<script src="http://x.example/x.js">|$a_b$'
LONG = "modegpt:selection=leverage,selection_qk=norm,gqa=paper,bias_refit=False"
METHODS = ("rankfold", LONG, "svd-llm")
SPARSITIES = (0.1, 0.3)
TASKS = ("arc_easy", "piqa", "winogrande", "hellaswag")
CALIBRATION = {"source": "wiki.txt", "num_samples": 32, "max_length": 1024, "seed": 0}
VERSIONS = {"rankfold": "0.1.0", "torch": "2.13.0"}


def config() -> dict:
    """``compare.json``."""
    texts = [{"text": name, "windows": 8, "length": 256, "limit": None} for name in ("wiki.test.raw", NASTY)]
    identity = {
        "base_model": f"model {NASTY}",
        "dtype": "float32",
        "device": "cpu",
        "calibration": CALIBRATION,
        "measures": {"texts": texts, "speed": {"batch": 8}},
    }
    return {"identity": identity, "runs": [{"methods": list(METHODS), "sparsities": list(SPARSITIES)}], "rows": []}


def rows() -> list[dict]:
    """The dense model, every method at every sparsity, and two that failed."""
    made = [_row("dense", 0.0, 0) | {"method": None, "mode": None, "modules": [], "held_out": None}]
    made[0]["compress_seconds"] = None
    made += [_row(label, s, i + 1) for i, label in enumerate(METHODS) for s in SPARSITIES]
    made[-1]["held_out"] = {"warning": "perplexity is 40 times that of the dense model: damaged in block 3"}
    return made + [_failed(s) for s in SPARSITIES[:2]]


def _row(label: str, sparsity: float, index: int) -> dict:
    texts = [25.0 * (1 + sparsity * (1 + index)) ** 2, 300.0 * (1 + 9 * sparsity * index)]
    speed = {"prefill_ratio": 1 + sparsity / (1 + index), "decode_ratio": 1 + sparsity / 2}
    rates = {"prefill_tokens_per_second": 12345.6, "decode_tokens_per_second": 321.0}
    modules = ("mlp", "qk", "vo") if index < 3 else ("q", "k", "v", "o", "gate", "up", "down")
    return {
        "label": label,
        "status": "done",
        "error": None,
        "sparsity": sparsity,
        "method": {"method": label.partition(":")[0]},
        "mode": "one-pass",
        "counts": {
            "sparsity": sparsity + 0.001 * index,
            "parameters": int(1.35e8 * (1 - sparsity)),
            "bytes": int(5.4e8 * (1 - sparsity)),
            "kv_bytes_per_token": 46080,
        },
        "modules": [_module(block, name, sparsity, index) for block in range(12) for name in modules],
        "held_out": {"warning": None},
        "compress_seconds": 12.5,
        "measures": {
            "texts": [
                {"text": text["text"], "perplexity": value, "definition": "exp of the mean loss"}
                for text, value in zip(config()["identity"]["measures"]["texts"], texts, strict=True)
            ],
            "speed": {**speed, **rates, "definition": "tokens over time"},
            "tasks": {
                task: {"acc": 0.3 + 0.1 * i - sparsity / 10, "acc_stderr": 0.012} for i, task in enumerate(TASKS)
            },
        },
        "versions": VERSIONS,
        "environment": {"device": "cpu", "accelerator": None, "cpu": NASTY, "threads": 2},
    }


def _module(block: int, name: str, sparsity: float, index: int) -> dict:
    kept = 1 - sparsity * (0.5 + block / 12)
    return {
        "block": block,
        "module": name,
        "rank": int(64 * kept),
        "of": 64,
        "weights": int(4096 * kept),
        "dense_weights": 4096,
        "relative_error": sparsity / (3 + index),
        "held_out_error": None if index == 2 else sparsity / (2 + index) * (1 + block / 6),
    }


def _failed(sparsity: float) -> dict:
    row = _row(f"zzz {NASTY}", sparsity, 1)
    row |= {"status": "failed", "error": f"cannot take module {NASTY}", "measures": None, "counts": None, "modules": []}
    return row | {"held_out": None, "compress_seconds": None, "versions": {}, "environment": {}}
