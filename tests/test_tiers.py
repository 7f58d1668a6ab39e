"""The cases that stand for a whole matrix: what they cover, decided here anew."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

from tiers import KINDS, PILLARS, TESTS, kinds_of, repeated, span

FAMILIES = [*KINDS, *(f"family-{i}" for i in range(10))]
METHODS = [f"method-{i}" for i in range(8)]
MODES = ["sequential", "one-pass"]


@dataclass(eq=False)
class Case:
    """What of a pytest item counts."""

    originalname: str
    family: str
    method: str
    mode: str

    @property
    def callspec(self):
        return SimpleNamespace(params={"case": (self.family, self.method), "mode": self.mode})


def test_every_kind_of_family_is_there_and_on_a_pillar_every_method_and_every_function_in_every_mode():
    cases = [Case(*values) for values in product(("test_a", "test_b", "test_c"), FAMILIES, METHODS, MODES)]
    spanning = span(cases)
    assert {c.family for c in spanning} == set(KINDS)
    on_pillars = [c for c in spanning if c.family in PILLARS]
    assert {c.method for c in on_pillars} == set(METHODS)
    assert {(c.originalname, c.mode) for c in on_pillars} == set(product(("test_a", "test_b", "test_c"), MODES))
    assert {(c.originalname, c.family) for c in on_pillars} == set(product(("test_a", "test_b", "test_c"), PILLARS))
    elsewhere = [c.originalname for c in spanning if c.family not in PILLARS]
    assert min(map(elsewhere.count, ("test_a", "test_b", "test_c"))) > len(elsewhere) / 6, "one stands for the others"
    assert len(spanning) <= len(METHODS) + len(KINDS) < len(cases) / 10


def test_every_file_has_the_pillars_and_every_kind_is_in_many_files():
    files = [kinds_of(path) for path in TESTS.glob("contracts/test_*.py")]
    assert len(files) > 30 and all(set(PILLARS) < kinds < set(KINDS) for kinds in files)
    assert all(sum(kind in kinds for kinds in files) > len(files) / 5 for kind in KINDS)
    assert kinds_of(TESTS / "contracts" / "test_modegpt.py") == kinds_of(TESTS / "test_modegpt.py")  # wherever it lies


def test_families_that_do_not_stand_for_others_in_a_file_are_left_out():
    cases = [Case("test_a", family, METHODS[0], MODES[0]) for family in FAMILIES]
    few = {*PILLARS, *KINDS[2::2]}
    assert {c.family for c in span(cases, few)} == few


def test_functions_with_a_few_cases_keep_them_all():
    few = [Case("test_few", family, "method-0", "sequential") for family in FAMILIES[:6]]
    many = [Case("test_many", family, "method-0", "sequential") for family in FAMILIES]
    assert set(few) <= span(few + many)


def test_a_case_without_arguments_stays():
    class Alone:
        originalname = "test_alone"

    alone = Alone()
    assert span([alone]) == {alone}


def test_what_is_of_the_engine_runs_on_one_family_of_each_kind():
    class Marked(Case):
        path = "file"

        def get_closest_marker(self, name):
            return name == "kinds" and self.originalname == "test_a"

    cases = [Marked(*values) for values in product(("test_a", "test_b"), FAMILIES, METHODS, MODES)]
    out = repeated(cases)
    assert {c.originalname for c in out} == {"test_a"} and not {c.family for c in out} & {*KINDS}
    assert len(out) == (len(FAMILIES) - len(KINDS)) * len(METHODS) * len(MODES)
