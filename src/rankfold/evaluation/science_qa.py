"""ScienceQA (arXiv:2209.09513), and its accuracy by the columns of LatentLLM's Table 4.

A model of text is asked as a task of lm-eval: the text of every choice is scored after the question, as for ARC, and
questions with a picture are left out. A model of images and text is asked all of them and writes the letter of a
choice, by the prompt and the reading of LLaVA's own scripts (``convert_sqa_to_llava_base_prompt.py``, form CQM-A;
``model_vqa_science.py --single-pred-prompt``; ``eval_science_qa.py``). An answer that names no choice is wrong. The
paper does not describe how it asked; its accuracies of 0 are below chance, as with answers that name no choice.
"""

import re
from typing import Any

LETTERS = "ABCDE"
ONE_LETTER = "Answer with the option's letter from the given choices directly."

HINT = "{% if hint %}Context: {{hint}}\n{% endif %}"


def without_pictures(rows):
    """Rows of the hub's data set, or of a file, that have text alone."""
    import datasets

    if "image" not in rows.column_names:
        return rows
    if isinstance(rows.features["image"], datasets.Image):  # whether there is one is known without decoding it
        rows = rows.cast_column("image", datasets.Image(decode=False))
    return rows.filter(lambda image: not image, input_columns="image").remove_columns("image")


SCIENCE_QA: dict[str, Any] = {
    "task": "scienceqa",
    "dataset_path": "derek-thomas/ScienceQA",
    "output_type": "multiple_choice",
    "training_split": "train",
    "validation_split": "validation",
    "test_split": "test",
    "process_docs": without_pictures,
    "doc_to_text": HINT + "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
    "metadata": {"version": 1.0},
}


def prompt_of(row: dict) -> str:
    """Return what a model of images and text is asked after the picture."""
    choices = " ".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False))
    return f"Context: {row['hint'].strip() or 'N/A'}\nQuestion: {row['question']}\nOptions: {choices}\n{ONE_LETTER}"


def choice_of(text: str, choices: int) -> int | None:
    """Return which choice a written answer names: a letter alone, before a full stop, or in ``The answer is B``."""
    text = text.strip().replace("\n", ". ")
    found = re.match(r"([A-E])(?:$|\. )", text) or re.search(r"The answer is ([A-E])", text)
    index = LETTERS.index(found[1]) if found else choices
    return index if index < choices else None


# Column -> whether a question belongs to it.
COLUMNS = {
    "NAT": lambda row: row["subject"] == "natural science",
    "SOC": lambda row: row["subject"] == "social science",
    "LAN": lambda row: row["subject"] == "language science",
    "TXT": lambda row: bool(row["hint"]),
    "IMG": lambda row: bool(row.get("image")),
    "NO": lambda row: not row["hint"] and not row.get("image"),
    "G1-6": lambda row: _grade(row) <= 6,
    "G7-12": lambda row: _grade(row) > 6,
}


def _grade(row: dict) -> int:
    return int(row["grade"].removeprefix("grade"))


def by_column(samples: list[dict]) -> dict[str, dict]:
    """Return the accuracy in each of :data:`COLUMNS`.

    Args:
        samples: a record of every question: ``{"doc": row, "acc": 0 or 1, ...}``.

    Returns:
        column -> ``{"acc", "acc_stderr", "samples"}``; see :func:`mean_and_error`.
    """
    table = {}
    for column, belongs in COLUMNS.items():
        values = [sample["acc"] for sample in samples if belongs(sample["doc"])]
        table[column] = mean_and_error("acc", values) | {"samples": len(values)}
    return table


def mean_and_error(metric: str, values: list[float]) -> dict[str, float | None]:
    """Return a mean and lm-eval's standard error of it.

    Each is ``None`` where there is no value, the error also where there is only one to estimate it from.
    """
    from lm_eval.api.metrics import mean, mean_stderr

    return {
        metric: mean(values) if values else None,
        f"{metric}_stderr": mean_stderr(values) if len(values) > 1 else None,
    }
