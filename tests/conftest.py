import sys

import pytest
import torch

from rankfold.cli import main

torch.set_num_threads(1)


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
