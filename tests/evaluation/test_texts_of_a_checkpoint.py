"""Which texts a checkpoint says it was calibrated or trained on."""

from types import SimpleNamespace

import pytest

from rankfold.errors import CheckpointError
from rankfold.evaluation.text import _calibrated_on

ONE, TWO = {"origin": "a.txt", "sha256": "0"}, {"origin": "wikitext2"}


def saying(fields):
    """A model whose config.json has these fields."""
    return SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=SimpleNamespace(fields=fields)))


@pytest.mark.parametrize(
    ("fields", "origins"),
    [
        ({"calibration": ONE}, ["a.txt"]),
        ({"calibration": {"texts": [ONE, TWO]}}, ["a.txt", "wikitext2"]),
        ({"calibration": {"texts": [TWO]}, "trained_on": ["c4"]}, ["wikitext2", "c4"]),
        ({"calibration": {"texts": []}, "trained_on": ["c4"]}, ["c4"]),
    ],
)
def test_all_texts_are_named(fields, origins):
    assert _calibrated_on(saying(fields)) == origins


@pytest.mark.parametrize("network", [SimpleNamespace(), SimpleNamespace(hf_quantizer=None), saying({})])
def test_what_no_text_went_into_names_none(network):
    assert not any(_calibrated_on(network))


@pytest.mark.parametrize(
    "fields",
    [
        {"calibration": "a.txt"},
        {"calibration": [ONE]},
        {"calibration": {"texts": "a.txt"}},
        {"calibration": {"texts": ["a.txt"]}},
        {"calibration": ONE, "trained_on": "c4"},
        {"calibration": ONE, "trained_on": None},
    ],
)
def test_a_damaged_record_is_one_line(fields):
    with pytest.raises(CheckpointError, match="copy or make the checkpoint again"):
        _calibrated_on(saying(fields))
