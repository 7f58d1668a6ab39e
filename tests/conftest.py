import sys

import pytest
import torch

import tiers
from rankfold.cli import main

torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """To import the slow tests takes longer than to run the fast ones."""
    return True if config.option.markexpr == "fast" and not tiers.has_fast(collection_path) else None


def pytest_collection_modifyitems(items):
    tiers.mark(items)


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Run a command line in the module's folder ``place``; (exit code, stdout, stderr)."""

    def call(line: str):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["rankfold", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return call
