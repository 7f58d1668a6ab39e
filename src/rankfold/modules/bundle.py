"""This code as one file, which lies beside the weights of every compressed checkpoint."""

import ast
import functools
from pathlib import Path

CODE_FILE = "modeling_rankfold.py"
PARTS = (
    "tensors",
    "sparse",
    "factors",
    "latent",
    "descriptions",
    "layers",
    "kernels",
    "norms",
    "attention",
    "latent_attention",
    "shortcuts",
    "experts",
    "building",
    "bundle",
    "loading",
)
_HEAD = """What runs inside a compressed model: the modules, and how ``from_pretrained`` puts them in place.

This file was put together from ``rankfold.modules`` and is self-contained (torch and transformers only), so that the
checkpoint beside it also loads where rankfold is not installed::

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

With ``import rankfold`` no remote code is needed; the code then comes from the package.
"""


@functools.cache
def code() -> str:
    """All parts in one; where this is that one file already, the file itself."""
    here = Path(__file__)
    if here.name == CODE_FILE:
        return here.read_text(encoding="utf-8")
    return bundle([here.with_name(f"{part}.py").read_text(encoding="utf-8") for part in PARTS])


def bundle(sources: list[str]) -> str:
    """Python files, each importing from earlier ones only, as one: their imports on top, then their definitions."""
    imports, bodies = set(), []
    for source in sources:
        tree, lines = ast.parse(source), source.splitlines()
        title = (ast.get_docstring(tree) or "").partition("\n")[0]
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not getattr(node, "level", 0):
                    imports.add(ast.unparse(node))
            elif not (_is_docstring(node) or _is_public_list(node)):
                continue
            span = slice(node.lineno - 1, node.end_lineno)
            lines[span] = [""] * len(lines[span])
        bodies.append(f"# {title}\n\n\n" + "\n".join(lines).strip("\n"))
    return f'"""{_HEAD}"""\n\n' + "\n".join(sorted(imports)) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_public_list(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
