"""Records: what is there is what was written, or one error names what is not."""

import json
import operator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfold._utils.files import read_json
from rankfold._utils.schema import NUMBER, Each, Maybe, OneOf, check_record
from rankfold.errors import CheckpointError
from rankfold.report.record import RECORD

PLACE = Path("folder/rankfold.json")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def some(kind):
    """Values that a kind describes."""
    if isinstance(kind, Maybe):
        return st.none() | st.deferred(lambda: some(kind.kind))  # a kind may have itself in it
    if isinstance(kind, OneOf):
        return st.sampled_from(kind.values)
    if isinstance(kind, Each):
        needed = st.fixed_dictionaries({key: some(kind.kind) for key in kind.needed})
        return st.builds(operator.or_, st.dictionaries(st.text(max_size=3), some(kind.kind), max_size=2), needed)
    if isinstance(kind, list):
        return st.lists(some(kind[0]), max_size=2)
    if isinstance(kind, dict):
        return st.fixed_dictionaries({key: some(below) for key, below in kind.items()})
    return {
        str: st.text(max_size=5),
        int: st.integers(),
        bool: st.booleans(),
        NUMBER: st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    }[kind]


@given(some(RECORD))
def test_a_record_as_described_passes(record):
    check_record(record, RECORD, PLACE)


@given(some(RECORD), st.data())
def test_a_record_with_one_key_less_is_refused_by_name(record, data):
    where, key = data.draw(
        st.sampled_from([(p, k) for p in ((), ("calibration",), ("counts",)) for k in _at(RECORD, p)])
    )
    if isinstance(_at(RECORD, where)[key], Maybe):
        return
    del _at(record, where)[key]
    with pytest.raises(CheckpointError, match=rf"rankfold\.json is damaged: .* lacks {key}; copy or make it again"):
        check_record(record, RECORD, PLACE)


def _at(value, path):
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN"])
def test_a_number_that_is_none_is_refused(number):
    with pytest.raises(
        CheckpointError, match=r"rankfold\.json is damaged: sparsity should be a number, got '(-?inf|nan)'"
    ):
        check_record(json.loads(f'{{"sparsity": {number}}}'), {"sparsity": NUMBER}, PLACE)


@given(VALUES)
def test_anything_else_is_refused_in_one_line(value):
    with pytest.raises(CheckpointError) as caught:
        check_record(value, RECORD, PLACE)
    assert str(caught.value).startswith(f"{PLACE} is damaged: ")


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    try:
        assert isinstance(read_json(path), dict)
    except CheckpointError as error:
        assert "any.json is missing or damaged (" in str(error)
