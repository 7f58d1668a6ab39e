"""A config that asks for tables of a size no machine has is refused before they are made."""

import json
import resource

import pytest

import rankfold
from families import tiny_model
from rankfold.errors import CheckpointError


@pytest.mark.parametrize(
    "family, name, value, said",
    [
        (
            "gptj",
            "max_position_embeddings",
            2 * 10**8,
            r"makes (9\.6|3\.2) GB of tables before it has a weight, for 200000000",
        ),
        ("gptj", "rotary_dim", 10**8, r"GB of tables before it has a weight, for 64 positions; correct max_position"),
        ("gpt_neo", "max_position_embeddings", 10**5, r"transformer\.wpe\.weight has shape \[64, 32\] in"),
        ("gpt2", "n_positions", 10**9, r"transformer\.wpe\.weight has shape \[64, 32\] in"),
    ],
)
def test_tables_are_counted_before_they_are_made(family, name, value, said, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (rankfold.open_model, rankfold.load):
        with pytest.raises(CheckpointError, match=said):
            read(tmp_path, device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "a quarter of a GB"
