"""Tests of what only newer versions of a dependency do."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.version import Version


def needs(package: str, least: str, lacking: str) -> None:
    """Skip what runs, with older versions of a package; ``lacking`` is what their users do without."""
    if Version(version(package)) < Version(least):
        pytest.skip(f"{package} < {least}: {lacking}")


def before(package: str, first: str, lacking: str) -> None:
    """Skip what does not run with newer versions of a package, of this one on."""
    if Version(version(package)) >= Version(first):
        pytest.skip(f"{package} >= {first}: {lacking}")


def needs_image_processors() -> None:
    """For what reads one by its Auto class, and for Idefics 3's."""
    if find_spec("torchvision") is None:
        needs("transformers", "5.18", "image processors need torchvision, and rankfold says so")


def needs_merged_tables() -> None:
    """For language models of Qwen2-VL and Qwen2.5-VL."""
    needs("transformers", "5.20", "rotary tables of three positions a token, which are refused")
