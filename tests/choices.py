"""Options of MoDeGPT by name, while some of them are still on their way in."""

from dataclasses import fields

import pytest

from rankfold import MoDeGPT

ONE_SHOT = {"select": "leverage", "select_qk": "norm"}  # the paper's selections: what is done where there is no choice
ELIMINATION = {"select": "elimination", "select_qk": "elimination"}


def has_option(name: str) -> bool:
    return name in {field.name for field in fields(MoDeGPT)}


def available(options: dict) -> dict:
    """The options that exist; skips the test where one is wanted that does not exist and is not what is done anyway."""
    for name, value in options.items():
        if not has_option(name) and ONE_SHOT.get(name) != value:
            pytest.skip(f"MoDeGPT has no option {name} yet")
    return {name: value for name, value in options.items() if has_option(name)}
