"""Command lines that somebody might type."""

import random

NUMBERS = ["", "0", "1", "-1", "0.3", "0.999", "2", "3", "nan", "inf", "-inf", "1e400", "1e-400", "9223372036854775808"]
NUMBERS += ["18446744073709551616", "9" * 5000, "0x10", "1_0", "-", "½", "x"]
NAMES = [
    "",
    "x",
    "-",
    "~nouser/x",
    "no/such/folder/x",
    "model",
    "text.txt",
    "[bold]",
    "a\nb",
    "x\udce9",
    "é",
    "x" * 300,
]
NAMES += ["/dev/null", "/proc/self/mem", "."]
MODULES = ["mlp", "qk,vo", "mlp,mlp", "mlp=0.2", "mlp=nan", "mlp=0.2,qk", ",", "=", "mlp=0.2=3", "x"]
SMALL = [number for number in NUMBERS if len(number) < 5]  # what may be trained on
METHOD_OPTIONS = [
    "selection=leverage",
    "ridge=1e-3",
    "ridge=nan",
    "ridge=",
    "=1",
    "x",
    "x=1",
    "sparsity=0.5",
    "bias_refit=maybe",
]
SHARED = {
    "--sparsity": NUMBERS,
    "--scope": ["blocks", "model", "all", ""],
    "--modules": MODULES,
    "--allocation": [
        *("uniform", "influence-modules", "x", "owl:", "owl:spread", "owl:=1", "uniform:x=1"),
        *(f"influence:temperature={number}" for number in NUMBERS),
    ],
    "--budget": [
        *("parameters", "bytes", "latency", "x", "", ":", "bytes:batch=2,batch=2"),
        *(f"flops:context={number}" for number in NUMBERS),
        *(f"bytes:batch={number}" for number in NUMBERS),
    ],
    "--rank-multiple": NUMBERS,
    "--exclude-blocks": ["0", "-1", "0,-1", "9", "x", ",", "0,0", "9" * 30],
    "--set": METHOD_OPTIONS,
    "--method": ["modegpt", "latentllm", "svd", "zs-svd", "sleb", "svdd", ""],
    "--target": ["transformers", "vllm", "llama.cpp", "stock", "onnx", ""],
    "--target-size": ["100KB", "1 MiB", "0", "-1MB", "nanMB", "1e400", "4", "MB", "x", ""]
    + ["110kB:float16", "1MB:q9", "1MB:", ":q4_0", "4:4:q8_0", "1:q4_0"],
    "--keep-quality": NUMBERS,
    "--config": ["small/rankfold.json", "small", "model/config.json", "text.txt", "nowhere.json", ""],
    "--revision": ["main", "a b", "../..", "\udce9", ""],
    "--moments": ["moments", "model", "text.txt", "nowhere", ""],
    "--component": ["language", "vision", "x", ""],
    "--components": ["language=0.3,vision=0.2", "language=0.3", "vision=nan,language=0", "languge=1", "=", ",", ""],
}
SOURCES = [
    "text.txt",
    "nowhere.txt",
    "model",
    "self",
    "ptb:nowhere",
    "",
    "text.txt=0.5",
    "self=-1",
    "pydoc=1e400",
    "=",
    "x=y",
    "language=text.txt",
    "vision=~nouser/x",
    "hub:x",
]
SIZES = {"--num-samples": NUMBERS, "--max-length": NUMBERS, "--seed": NUMBERS, "--shards": NUMBERS}
TEXT = {"--calibration": SOURCES, "--text-column": ["text", "x", ""], **SIZES}
ANY = {
    "--dtype": ["auto", "float32", "bfloat16", "float16", "int8", ""],
    "--device": ["cpu", "tpu", ""],
    "--json": [None],
    "--nonsense": ["1"],
}
FEW = [number for number in NUMBERS if len(number) < 10]  # tokens to generate
WRITING = ANY | {"--max-new-tokens": FEW, "--temperature": NUMBERS, "--seed": NUMBERS, "--revision": ["main", ""]}
OPTIONS = {
    "compress": SHARED
    | TEXT
    | ANY
    | {"-o": NAMES, "--mode": ["sequential", "one-pass", "both", ""], "--dry-run": [None]}
    | {"--recover": ["1s", "0s", "-1min", "15", "nanh", "1e9h", "x", ""]},
    "plan": SHARED
    | TEXT
    | ANY
    | {"-o": NAMES, "--gpu": ["80GB", "h100", "0GB", "-1GB", "nanGB", "x", ""], "--gpus": NUMBERS},
    "calibrate": TEXT | ANY | {"-o": NAMES},
    "evaluate": ANY
    | {
        "--text": NAMES,
        "--max-length": NUMBERS,
        "--limit": NUMBERS,
        "--text-column": ["text", "x"],
        "--batch-size": NUMBERS,
    }
    | {"--tasks": ["piqa,piqa", ""], "--include-path": NAMES, "--num-fewshot": NUMBERS}
    | {"--baseline": NAMES, "--batch-sizes": ["0", "1,x", ""], "--stream": [None], "--generation": [None]},
    "recover": ANY
    | {"-o": NAMES, "--teacher": NAMES, "--calibration": SOURCES, "--text-column": ["text", "x", ""]}
    | {"--tune": ["all", "lora", "lora-mlp", "norms", "x", ""], "--loss": ["kl", "next-token", "both", "x"]}
    | {"--tokens": ["64", *SMALL], "--minutes": ["0.001", *SMALL], "--rank": ["2", *SMALL], "--lr": NUMBERS}
    | {"--batch-tokens": ["32", *SMALL], "--max-length": NUMBERS, "--tolerance": NUMBERS, "--seed": NUMBERS}
    | {"--adapter": [None], "--blockwise": [None], "--cache-logits": NAMES, "--gradient-checkpointing": [None]}
    | {"--report-to": ["none", "x", ""]},
    "compare": TEXT
    | ANY
    | {"-o": NAMES, "--text": NAMES, "--text-length": NUMBERS, "--limit": NUMBERS, "--keep": [None]}
    | {"--methods": ["svd", "modegpt,modegpt", "modegpt:x=1", "modegpt:", ":", ",", "svdd", ""]}
    | {"--sparsities": ["0.2", "0.3,0.3", "1", "-1", "nan", "x", ",", ""], "--protocol": ["lowrankarena", "x", ""]},
    "push": {"--private": [None], "--force": [None], "--json": [None], "--nonsense": ["1"]},
    "generate": WRITING,
    "chat": WRITING | {"--system": ["Be brief.", *NAMES]},
    "export": {
        "-o": NAMES,
        "--format": ["stock", "deci", "gguf", "gguf-deci", "onnx", ""],
        "--dtype": ["auto", "float16", "q8_0", "int4", ""],
        "--json": [None],
        "--nonsense": ["1"],
    },
    "inspect": {"--json": [None], "--nonsense": [None]},
    "models": {"--json": [None], "--nonsense": [None]},
    "methods": {"--json": [None], "--nonsense": [None]},
}
SPOKEN = [b"hello\n/exit\nlost\n", b"", b"\n\n", b"\xff\xfe\n", b"\x00\n", b"a " * 5000 + b"\n", "\N{SNOWMAN}".encode()]
FITTING = ["--calibration", "text.txt", "--num-samples", "4", "--max-length", "32"]
USUAL = {
    "compress": ["model", "-o", "out", "--rank-multiple", "2", "--device", "cpu", *FITTING],
    "plan": ["model", "--rank-multiple", "2", "--device", "cpu", *FITTING],
    "calibrate": ["model", "-o", "out", "--device", "cpu", *FITTING],
    "evaluate": ["small", "--text", "text.txt", "--max-length", "32", "--limit", "2", "--device", "cpu"],
    "recover": [
        *("small", "-o", "out", "--teacher", "model", "--calibration", "text.txt", "--tokens", "64"),
        *("--batch-tokens", "64", "--max-length", "16", "--device", "cpu"),
    ],
    "compare": [
        *("model", "-o", "out", "--methods", "modegpt:rank_multiple=2", "--sparsities", "0.3", "--text", "text.txt"),
        *("--text-length", "32", "--limit", "2", "--device", "cpu", *FITTING),
    ],
    "push": ["small", "no/such"],
    "generate": ["small", "hello", "--max-new-tokens", "2", "--device", "cpu"],
    "chat": ["small", "--max-new-tokens", "2", "--device", "cpu"],
    "export": ["small", "-o", "out"],
    "inspect": ["small"],
    "models": [],
    "methods": [],
}


def spoken(rng: random.Random) -> bytes:
    """What is typed into a chat, or comes out of a pipe."""
    return rng.choice(SPOKEN)


def hostile_line(rng: random.Random) -> list[str]:
    """A usual command with up to three options changed or added, sometimes one missing, doubled or renamed."""
    command = rng.choice(["compress"] * 4 + ["calibrate"] * 2 + sorted(USUAL))
    arguments = list(USUAL[command])
    for _ in range(rng.randrange(4)):
        option = rng.choice(sorted(OPTIONS[command]))
        value = rng.choice(OPTIONS[command][option])
        if option in arguments[:-1] and rng.random() < 0.9:
            arguments[arguments.index(option) + 1] = value or ""
        else:
            arguments += [option] if value is None else [option, value]
    if arguments and rng.random() < 0.1:
        at = rng.randrange(len(arguments))
        arguments[at : at + 1] = rng.choice([[], [arguments[at]] * 2, [rng.choice(NAMES)]])
    if arguments and not arguments[0].startswith("-") and rng.random() < 0.1:
        arguments[0] = rng.choice(NAMES)
    return [command, *arguments]
