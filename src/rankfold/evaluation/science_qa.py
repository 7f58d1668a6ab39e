"""ScienceQA (arXiv 2209.09513) as a task of lm-eval, and its accuracy by the columns of LatentLLM's Table 4.

The text of every choice is scored after the question, as lm-eval does for ARC. The table's models write an answer and see
pictures: its numbers are of another kind. Questions with a picture are left out.
"""

from typing import Any

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
# Column -> whether a question belongs to it; IMG is empty as long as pictures are left out.
COLUMNS = {
    "NAT": lambda row: row["subject"] == "natural science",
    "SOC": lambda row: row["subject"] == "social science",
    "LAN": lambda row: row["subject"] == "language science",
    "TXT": lambda row: bool(row["hint"]),
    "NO": lambda row: not row["hint"],
    "G1-6": lambda row: _grade(row) <= 6,
    "G7-12": lambda row: _grade(row) > 6,
}


def _grade(row: dict) -> int:
    return int(row["grade"].removeprefix("grade"))


def by_column(samples: list[dict]) -> dict[str, dict]:
    """Accuracy in each of :data:`COLUMNS`.

    Args:
        samples: lm-eval's record of every question: ``{"doc": row, "acc": 0 or 1, ...}``.

    Returns:
        column -> ``{"acc", "acc_stderr", "samples"}``; the standard error is lm-eval's, of a mean; ``None`` where there is
        no question, or only one to estimate it from.
    """
    from lm_eval.api.metrics import mean, mean_stderr

    table = {}
    for column, belongs in COLUMNS.items():
        values = [sample["acc"] for sample in samples if belongs(sample["doc"])]
        table[column] = {
            "acc": mean(values) if values else None,
            "acc_stderr": mean_stderr(values) if len(values) > 1 else None,
            "samples": len(values),
        }
    return table
