"""Write docs/models.md: the models that rankfold knows by name, as `rankfold models` lists them."""

from pathlib import Path

from rankfold.cli.models import rows_of_models

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

A model has one part or several; `--component` chooses one. The family of a part is the `model_type` of its config. LLaVA,
LLaVA-NeXT, Idefics 3 and SmolVLM take a language model of any family; the one that transformers makes by default is shown.

- **mlp**: hidden units are removed, of every expert where there are experts.
- **qk**: rotary *pairs* of queries and keys are removed; *svd*: nothing rotates, so directions are; *dense*: they stay. With a
  norm over queries and keys, pairs are removed only *where named* (`--modules mlp,qk,vo`).
- **vo**: values and outputs are compressed jointly.

`rankfold models MODEL` shows one model, of other families too. This page is made by `python scripts/models_page.py`.

"""


def page() -> str:
    """Return the text of the page."""
    rows = rows_of_models()
    cells = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return HEAD + "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
