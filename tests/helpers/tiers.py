"""Which tests are fast, and which only the whole matrix of families, methods and options has.

``pytest -m fast``: files named here, whole. ``pytest -m "not matrix"``: these, and of all other files those cases that
span the others; ``pytest -m matrix``: the rest. A function marked ``kinds`` is of the engine: it runs on one family of
each kind in all tiers together.
"""

import functools
import heapq
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import combinations, product
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# Pure mathematics, allocation, options, records, and a tiny model from the command line to a loaded checkpoint; ...
FAST = (
    *("allocation", "architectures", "cli", "linalg", "methods/test_ranges.py", "modules/test_descriptions.py"),
    *("modules/test_triangles.py", "report/test_commands.py", "test_errors.py", "test_tiers.py", "e2e/test_tiny.py"),
)
# ... but for these, which alone take as long as the others together.
SLOW = ("linalg/test_bounds.py", "linalg/test_joint_mlp.py")
# Files of which no case is in the matrix: to train their models once more takes longer than to run all cases.
WHOLE = ("e2e/test_quality.py",)
FEW = 6  # a function with no more cases keeps them all
# Families that every function runs on: gated, grouped, rotary, without biases; and the opposite of all four.
PILLARS = ("llama", "opt")
# One of each kind that a spec tells apart; a file has half of them. The others are in the matrix alone, where what the
# functions of a file share on a family, a compression most often, is made once; of a case in both tiers it would be
# made twice.
KINDS = (
    *PILLARS,
    *("gpt_neox", "gpt2", "phi3"),  # fused: heads one after the other, transposed, grouped and gated
    *("falcon-gqa", "bloom"),  # parallel with grouped keys; ALiBi
    *("qwen3", "gemma3"),  # normalised queries and keys; and what is sent, one key head, windows
    *("cohere2", "mixtral", "gpt_oss"),  # adjacent pairs, a block without rotation; experts; sinks
    "deepseek_v3",  # keys and values that are latents already, shared experts
    *("bert-head", "modernbert-head", "vit-head", "clip-vision", "qwen2.5-vl"),  # encoders
)


def repeated(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return cases of functions marked ``kinds`` on families that another one of their kind stands for."""
    functions, found = defaultdict(list), set()
    for item in items:
        if item.get_closest_marker("kinds"):
            functions[item.path, item.originalname].append(item)
    for cases in functions.values():
        values = {item: values_of(item) for item in cases}
        families = families_of(set().union(*values.values()))
        found |= {item for item in cases if any(axis in families and kind not in KINDS for axis, kind in values[item])}
    return found


def families_of(values: set[tuple[str, str]]) -> set[str]:
    """Return the arguments that are families."""
    return {axis for axis, _ in values if sum((axis, kind) in values for kind in KINDS) > 1}


def mark(items: list[pytest.Item]) -> None:
    """Mark tests as ``fast`` and as ``matrix``."""
    files = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            continue
        if is_in(item.path, FAST) and not is_in(item.path, SLOW):
            item.add_marker("fast")
        elif not is_in(item.path, WHOLE):
            files[item.path].append(item)
    for path, cases in files.items():
        spanning = span(cases, kinds_of(path))
        for item in cases:
            if item not in spanning:
                item.add_marker("matrix")


@functools.cache
def is_in(path: Path, places: tuple[str, ...]) -> bool:
    """Return whether a file or folder is one of these places or below one."""
    return any(path.is_relative_to(TESTS / place) for place in places)


def has_fast(path: Path) -> bool:
    """Return whether a file or folder has fast tests in it."""
    return (is_in(path, FAST) and not is_in(path, SLOW)) or any((TESTS / place).is_relative_to(path) for place in FAST)


def kinds_of(path: Path) -> set[str]:
    """Return the families that stand for all in a file: the pillars, and the other kinds, in turns with other files."""
    return {*PILLARS, *KINDS[len(PILLARS) + zlib.crc32(path.stem.encode()) % 2 :: 2]}


def span(items: list[pytest.Item], kinds: Collection[str] = KINDS) -> set[pytest.Item]:
    """Choose cases of one file that span the others.

    Every value of every argument is in one, of families those of ``kinds``. Every function meets both pillars, and
    every value of a short argument on one of them. Every pair of values of two long ones is in one; of families (with
    methods, say) those with one of the pillars. Functions with a few cases keep them all.
    """
    values = {item: values_of(item) for item in items}
    every = set().union(*values.values())
    lengths = Counter(axis for axis, _ in every)
    families = families_of(every)
    others = {(axis, value) for axis, value in every if axis in families and lengths[axis] > FEW and value not in kinds}
    functions = defaultdict(list)
    for item in items:
        functions[item.originalname].append(item)
    wanted = {item: demands(item.originalname, values[item] - others, lengths, families) for item in items}
    chosen = {item for cases in functions.values() if len(cases) <= FEW for item in cases}
    covered = set().union(*(wanted[item] for item in chosen))
    mixed = random.Random(0).sample(items, len(items))  # so that each family meets another function
    queue = [(-len(wanted[item] - covered), place) for place, item in enumerate(mixed) if item not in chosen]
    heapq.heapify(queue)
    while queue:  # greedy: the case that adds most; what a case adds only falls, so most need no second look
        adds, place = heapq.heappop(queue)
        now = len(wanted[mixed[place]] - covered)
        if now and now == -adds:
            chosen.add(mixed[place])
            covered |= wanted[mixed[place]]
        elif now:
            heapq.heappush(queue, (-now, place))
    return chosen


def demands(function: str, values: set[tuple[str, str]], lengths: dict[str, int], families: set[str]) -> set:
    """Return what a case is an example of; ``families``: arguments that are families."""
    short = {(axis, value) for axis, value in values if lengths[axis] <= FEW}
    pillars = {(axis, value) for axis, value in values - short if value in PILLARS}
    either = {(axis, "one of the pillars") for axis, _ in pillars}
    paired = {(axis, value) for axis, value in values - short if axis not in families} | either
    return {
        function,
        *values,
        *product([function], short | pillars),
        *product([function], either, short),
        *combinations(sorted(paired), 2),
    }


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the arguments of a case with their values; of tuples each part."""
    call = getattr(item, "callspec", None)
    found = set()
    for name, value in call.params.items() if call else ():
        for place, part in enumerate(value if isinstance(value, tuple) else (value,)):
            found.add((f"{name}.{place}", part if isinstance(part, str) else repr(part)))
    return found
