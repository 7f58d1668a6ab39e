"""A page that compresses a model: its plan, its perplexity, and what it writes before and after.

Runs as a Gradio Space, or here: pip install gradio rankfold; python examples/space/app.py

Environment: MODELS (hub ids or folders, a comma between them), TEXT (calibration set), SAMPLES and LENGTH (its size).
"""

import contextlib
import functools
import os
from collections.abc import Iterator

import gradio as gr

import rankfold

MODELS = os.environ.get("MODELS", "HuggingFaceTB/SmolLM2-135M,HuggingFaceTB/SmolLM2-135M-Instruct,Qwen/Qwen3-0.6B")
TEXT = os.environ.get("TEXT", "wikitext2")
SAMPLES, LENGTH = int(os.environ.get("SAMPLES", "16")), int(os.environ.get("LENGTH", "512"))
METHODS = ["rankfold", "modegpt", "latentllm"]

open_model = functools.lru_cache(maxsize=1)(rankfold.open_model)


def plan(name: str, sparsity: float, method: str) -> str:
    """Return ranks and sizes as Markdown; no weight changes."""
    with readable_errors():
        sizes = {"num_samples": SAMPLES, "max_length": LENGTH}
        return sizes_of(rankfold.plan(open_model(name), sparsity, method=method, calibration=TEXT, **sizes))


def compress(name: str, sparsity: float, method: str, prompt: str) -> tuple[str, str, str]:
    """Return sizes and perplexity as Markdown, and what the dense and the compressed model write."""
    with readable_errors():
        dense = open_model(name)
        sizes = {"num_samples": SAMPLES, "max_length": LENGTH}
        small = rankfold.compress(dense, sparsity, method=method, calibration=TEXT, **sizes)
        scores = small.record["held_out"]
        perplexity = f"| perplexity | {scores['perplexity_dense']:.2f} | {scores['perplexity']:.2f} |\n"
        texts = (continued(model, dense.tokenizer, prompt) for model in (dense.whole_model(), small.model))
        return sizes_of(small.plan) + perplexity, *texts


def sizes_of(found: rankfold.Plan) -> str:
    """Return a Markdown table of a plan."""
    rows = {
        "parameters": (found.parameters, found.parameters_after),
        "KV-cache bytes per token": (found.kv_bytes_per_token, found.kv_bytes_per_token_after),
    }
    lines = [f"| {name} | {before:,} | {after:,} |\n" for name, (before, after) in rows.items()]
    return "| | dense | compressed |\n|---|--:|--:|\n" + "".join(lines)


def continued(model, tokenizer, prompt: str) -> str:
    """Return a prompt and what a model writes after it."""
    ids = tokenizer(prompt, return_tensors="pt").to(model.device)
    written = model.generate(**ids, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(written[0], skip_special_tokens=True)


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Show an error of rankfold, which says what to do, on the page."""
    try:
        yield
    except rankfold.RankfoldError as error:
        raise gr.Error(str(error)) from error


with gr.Blocks(title="rankfold") as app:
    gr.Markdown("# rankfold\nShrink a language model without training. Choose a model and how much of it to remove.")
    with gr.Row():
        names = MODELS.split(",")
        model = gr.Dropdown(names, value=names[0], allow_custom_value=True, label="Model")
        fraction = gr.Slider(0.1, 0.6, value=0.3, step=0.05, label="Sparsity")
        how = gr.Radio(METHODS, value=METHODS[0], label="Method")
    start = gr.Textbox("The capital of France is", label="Prompt")
    with gr.Row():
        planning = gr.Button("Plan", elem_id="plan")
        compressing = gr.Button("Compress", variant="primary", elem_id="compress")
    table = gr.Markdown(elem_id="table")
    with gr.Row():
        before = gr.Textbox(label="Dense", elem_id="before", lines=6)
        after = gr.Textbox(label="Compressed", elem_id="after", lines=6)
    planning.click(plan, [model, fraction, how], table)
    compressing.click(compress, [model, fraction, how, start], [table, before, after])

if __name__ == "__main__":
    app.launch()
