import gc
import os
import sys

import psutil
import pytest
import torch
import transformers
from huggingface_hub import constants

import tiers
from few_probe_texts import score_few
from rankfold.cli import main

torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """To import the slow tests takes longer than to run the fast ones."""
    return True if config.option.markexpr == "fast" and not tiers.has_fast(collection_path) else None


def pytest_collection_modifyitems(config, items):
    repeated = tiers.repeated(items)
    config.hook.pytest_deselected(items=[*repeated])
    items[:] = [item for item in items if item not in repeated]
    tiers.mark(items)


def pytest_collection_finish():
    """Take what stays for the session, transformers and the tests, out of what garbage collections look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def in_a_hurry():
    """Do not wait for the disk after every file, nor give memory back after every block, nor write every config out.

    No power fails, and no model is large.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(psutil, "heap_trim", lambda: None, raising=False)
        patch.setattr(
            transformers.PreTrainedConfig, "__repr__", object.__repr__
        )  # written out for a log that nobody reads
        yield


@pytest.fixture(scope="session", autouse=True)
def few_probe_texts():
    """Score one passage of every kind, here and in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        score_few(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep nothing in the cache of the user, and ask nothing of the hub, here and in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
