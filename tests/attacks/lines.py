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
    "--method": ["modegpt", "latentllm", "svd", "svdd", ""],
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
SIZES = {"--num-samples": NUMBERS, "--max-length": NUMBERS, "--seed": NUMBERS}
TEXT = {"--calibration": SOURCES, "--text-column": ["text", "x", ""], **SIZES}
ANY = {
    "--dtype": ["auto", "float32", "bfloat16", "float16", "int8", ""],
    "--device": ["cpu", "tpu", ""],
    "--json": [None],
    "--nonsense": ["1"],
}
FEW = [number for number in NUMBERS if len(number) < 10]  # tokens to generate
OPTIONS = {
    "compress": SHARED
    | TEXT
    | ANY
    | {"-o": NAMES, "--mode": ["sequential", "one-pass", "both", ""], "--dry-run": [None]},
    "plan": SHARED | TEXT | ANY | {"-o": NAMES},
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
    | {"--baseline": NAMES, "--batch-sizes": ["0", "1,x", ""]},
    "generate": ANY | {"--max-new-tokens": FEW, "--temperature": NUMBERS, "--seed": NUMBERS},
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
FITTING = ["--calibration", "text.txt", "--num-samples", "4", "--max-length", "32"]
USUAL = {
    "compress": ["model", "-o", "out", "--rank-multiple", "2", "--device", "cpu", *FITTING],
    "plan": ["model", "--rank-multiple", "2", "--device", "cpu", *FITTING],
    "calibrate": ["model", "-o", "out", "--device", "cpu", *FITTING],
    "evaluate": ["small", "--text", "text.txt", "--max-length", "32", "--limit", "2", "--device", "cpu"],
    "generate": ["small", "hello", "--max-new-tokens", "2", "--device", "cpu"],
    "export": ["small", "-o", "out"],
    "inspect": ["small"],
    "models": [],
    "methods": [],
}


def hostile_line(rng: random.Random) -> list[str]:
    """A usual command with up to three options changed or added, sometimes with something missing, doubled or renamed."""
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
