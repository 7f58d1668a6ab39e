"""mutmut, which leaves decorated functions alone, for a house where the functions that count are under ``torch.no_grad()``.

That decorator may be applied to every copy of a function that mutmut makes, so it is overlooked when it alone is there.
`python scripts/mutmut_here.py run …` is `mutmut run …`; nothing of rankfold is imported, for it is the copy that counts.
"""

import libcst as cst
from libcst import matchers
from mutmut.mutation.file_mutation import MutationVisitor

NO_GRAD = matchers.Decorator(matchers.Call(matchers.Attribute(matchers.Name("torch"), matchers.Name("no_grad"))))


def overlook_no_grad() -> None:
    plain = MutationVisitor._skip_node_and_children

    def skip(self: MutationVisitor, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and all(matchers.matches(d, NO_GRAD) for d in node.decorators):
            node = node.with_changes(decorators=())
        return plain(self, node)

    MutationVisitor._skip_node_and_children = skip


if __name__ == "__main__":
    from mutmut.__main__ import cli

    overlook_no_grad()
    cli()
