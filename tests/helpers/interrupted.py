"""A run that is interrupted and given again."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rankfold


def assert_ends_in_the_same_bytes(compress: Callable[[Path], object], folder: Path, monkeypatch) -> None:
    """``compress`` into a folder at once, and into another one in two goes, the first of which ends before block 2."""
    compress(folder / "whole")
    run = rankfold.pipeline.run_stages

    def stop(work, view, ranks):
        if view.index == 2:
            raise KeyboardInterrupt
        return run(work, view, ranks)

    monkeypatch.setattr(rankfold.pipeline, "run_stages", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(folder / "parts")
    monkeypatch.setattr(rankfold.pipeline, "run_stages", run)
    compress(folder / "parts")
    names = {path.name for path in (folder / "whole").iterdir()}
    assert names == {path.name for path in (folder / "parts").iterdir()}
    for file in names - {"rankfold.json", "README.md"}:
        assert (folder / "whole" / file).read_bytes() == (folder / "parts" / file).read_bytes(), file
