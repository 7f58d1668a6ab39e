"""mutmut, told two things it does not know; `python scripts/mutmut_here.py run …` is `mutmut run …`.

It leaves decorated functions alone, but the functions that count here are under ``torch.no_grad()``. That decorator may
be applied to every copy of a function that mutmut makes, so it is overlooked when it alone is there.

It runs, for a mutant, the tests during which the function ran. What a module's fixture ran is seen during the first
test only, so it would be tried on that one alone: here it counts for every test that is handed the fixture.

Nothing of rankfold is imported, for it is the copy that counts.
"""

from collections.abc import Iterator
from typing import Any

import libcst as cst
import pytest
from libcst import matchers
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.runners.harness import PytestRunner
from mutmut.state import state

NO_GRAD = matchers.Decorator(matchers.Call(matchers.Attribute(matchers.Name("torch"), matchers.Name("no_grad"))))


def overlook_no_grad() -> None:
    plain = MutationVisitor._skip_node_and_children

    def skip(self: MutationVisitor, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and all(matchers.matches(d, NO_GRAD) for d in node.decorators):
            node = node.with_changes(decorators=())
        return plain(self, node)

    MutationVisitor._skip_node_and_children = skip


class SharedFixtures:
    """Adds what a test's fixtures ran to what mutmut saw the test itself run."""

    def __init__(self):
        self.ran: dict[Any, set[str]] = {}  # fixture -> functions of its last setup, which the tests behind it share

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef) -> Iterator[None]:
        seen = state()._stats
        state()._stats = self.ran[fixturedef] = set()
        try:
            return (yield)
        finally:
            state()._stats = seen | self.ran[fixturedef]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        fixtures = (f for name in item.fixturenames for f in item._fixtureinfo.name2fixturedefs.get(name, ()))
        state()._stats.update(*(self.ran.get(fixture, ()) for fixture in fixtures))


def share_fixtures() -> None:
    plain = PytestRunner.execute_pytest

    def execute(self: PytestRunner, params: list[str], plugins=(), **options) -> int:
        return plain(self, params, plugins=[*plugins, SharedFixtures()], **options)

    PytestRunner.execute_pytest = execute


if __name__ == "__main__":
    from mutmut.__main__ import cli

    overlook_no_grad()
    share_fixtures()
    cli()
