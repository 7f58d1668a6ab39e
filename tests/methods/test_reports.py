"""What is reported where nothing is done, and where nothing can be lost."""

from dataclasses import replace

import pytest

import rankfold
from families import ANY_MODEL, opened, some_ids, tokens
from rankfold import MoDeGPT
from rankfold._utils.files import read_json
from rankfold.calibration.runner import measure, start


def decomposed(source, ranks: dict[str, int]):
    method, view = MoDeGPT(modules=tuple(ranks), rank_multiple=2), source.block(0)
    moments = measure(view, start(source, tokens().ids, autocast=None), method.statistics(view), step=False)
    return method.decompose(view, moments, ranks), moments


def test_modules_that_stay_dense_are_reported_without_error():
    full = {"mlp": 48, "qk": 8, "vo": 8}
    result, _ = decomposed(opened("llama"), full)
    assert result.reports == {name: {"rank": n, "of": n, "relative_error": 0.0} for name, n in full.items()}
    assert not result.errors and not result.modules


def changed(family: str, scale: float, *paths: str):
    """A tiny model with some layers of its first block a factor smaller."""
    source = opened(family)
    for path in paths:
        for parameter in source.blocks[0].get_submodule(path).parameters():
            parameter.data.mul_(scale)
    return source


def both_errors(source, ranks: dict[str, int]) -> list[float]:
    """Of every module as the fit and as the moments say it."""
    result, moments = decomposed(source, ranks)
    assert result.errors.keys() == ranks.keys()
    fitted = [result.reports[name]["relative_error"] for name in result.errors]
    return fitted + [error(moments) for error in result.errors.values()]


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("llama", ("mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("opt", ("fc2", "self_attn.k_proj", "self_attn.v_proj")),
    ],
)
def test_modules_that_send_nothing_lose_nothing(family, paths):
    assert both_errors(changed(family, 0.0, *paths), {"mlp": 24, "qk": 4, "vo": 4}) == [0.0] * 6


@pytest.mark.parametrize(
    ("module", "rank", "path"),
    [("mlp", 24, "mlp.down_proj"), ("qk", 4, "self_attn.k_proj"), ("vo", 4, "self_attn.o_proj")],
)
def test_relative_errors_do_not_depend_on_the_scale_of_what_is_sent(module, rank, path):
    """Weights a thousand times smaller, as trained ones may be."""
    plain, small = (both_errors(changed("llama", scale, path), {module: rank}) for scale in (1.0, 1e-3))
    assert min(plain) > 0.01
    assert small == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("name", ANY_MODEL)
@pytest.mark.parametrize("path", ["mlp.up_proj", "self_attn.v_proj"])
def test_every_method_reports_numbers_where_a_module_of_the_first_block_sends_nothing(name, path, tmp_path):
    """Nothing is missing after a module that sends nothing, so a share of what is missing has no scale."""
    options = {} if name in ("wanda", "sparsegpt", "pruner-zero") else {"sparsity": 0.3}
    options |= {"allocation": "uniform"} if name == "rankfold" else {}
    windows = replace(tokens(), held_out=some_ids(2, 32, seed=2))
    method, folder = rankfold.make_method(name, **options), tmp_path / "small"
    rankfold.compress(
        changed("llama", 0.0, path), method=method, calibration=windows, output=folder
    )  # a record with NaN cannot be written
    read_json(folder / "rankfold.json")
