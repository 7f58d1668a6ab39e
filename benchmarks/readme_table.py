"""The first table of the README, out of the records; `render.py` writes it."""

import re
from pathlib import Path

from rankfold.errors import CheckpointError
from rankfold.files import read_json, write_text

DEFAULT, PAPER, LATENT = "rankfold", "modegpt, the paper's forms", "latentllm (joint)"
HEAD = "| SmolLM2-135M, 2 CPU cores | dense | sparsity 0.3 |"
TABLE = re.compile(rf"^{re.escape(HEAD)}\n(\|.*\n)+", re.M)
MODELS = {
    "perplexity_smollm2": "WikiText-2 perplexity",
    "perplexity_qwen2.5": "… of Qwen2.5-Coder-0.5B",
    "perplexity_gemma3": "… of Gemma 3 270M",
}


def render(results: Path, readme: Path) -> None:
    """Replace the table in the README.

    Raises:
        CheckpointError: it has none, or more than one.
    """
    text, count = TABLE.subn(lambda _: "\n".join(table(results)) + "\n", readme.read_text(encoding="utf-8"))
    if count != 1:
        raise CheckpointError(f"{readme.name} has {count} tables that begin with {HEAD!r}; one is wanted")
    write_text(readme, text)


def table(results: Path) -> list[str]:
    """Its lines; a record or a row that is missing ends in an error."""
    smol = rows(results, "perplexity_smollm2")
    sizes = (f"{smol[name]['parameters'] / 1e6:.1f} M" for name in ("dense", f"{DEFAULT} 0.3"))
    return [
        HEAD,
        "|---" * 3 + "|",
        line("parameters", *sizes),
        *(perplexity(what, rows(results, name)) for name, what in MODELS.items()),
        accuracy(rows(results, "zero_shot_smollm2")),
        speed(rows(results, "speed")),
        cost(rows(results, "compression_cost")),
    ]


def rows(results: Path, name: str) -> dict[str, dict]:
    return {row["name"]: row for row in read_json(results / f"{name}.json")["rows"]}


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def perplexity(what: str, of: dict) -> str:
    def number(name: str) -> str:
        value = of[name]["perplexity"]
        return f"{value:.1f}" if value < 200 else f"{value:.0f}"

    others = f"`modegpt`: {number('modegpt 0.3')}; the paper's forms: {number(f'{PAPER} 0.3')}"
    return line(f"{what} ({others})", number("dense"), number(f"{DEFAULT} 0.3"))


def accuracy(of: dict) -> str:
    def number(name: str) -> str:
        return f"{of[name]['mean']:.1%}".replace("%", " %")

    others = f"`modegpt`: {number('modegpt 0.3')}; the paper's forms: {number(f'{PAPER} 0.3')}"
    others += f"; `latentllm`: {number(f'{LATENT} 0.3')}"
    return line(f"zero-shot accuracy, mean of four tasks ({others})", number("dense"), number(f"{DEFAULT} 0.3"))


def speed(of: dict) -> str:
    full, half = (
        f"× {of[f'blocks 8x512 {dtype}']['models']['compressed']['ratio']:.2f}" for dtype in ("float32", "bfloat16")
    )
    return line("prefill of the blocks, fp32 (bf16)", "× 1", f"{full} ({half})")


def cost(of: dict) -> str:
    ratios = of["autocast"]["ratios"]
    default, sequential, one_pass = (f"{ratios[kind]['ratio']:.1f}" for kind in ("default", "sequential", "one-pass"))
    what = "cost of compressing, in plain forwards over 32 x 1024 calibration tokens"
    return line(what, "–", f"{default}; `modegpt` {sequential}, in one pass {one_pass}")
