"""Windows kept out of the fit: their errors, drift and perplexities, against plain computations on the whole models."""

import itertools
import json
import logging
import math

import pytest
import torch

import rankfold
from activations import blocks_of
from families import CONFIGS, EXPERTS, opened, some_ids, tiny_model, tokens
from rankfold import CalibrationData, MoDeGPT, make_method
from rankfold.calibration import likelihood, runner
from rankfold.calibration.runner import advance, measure, start
from rankfold.compression import block as stages
from rankfold.compression import held_out
from rankfold.compression.held_out import HeldOut, explained_ratio
from rankfold.methods import BlockResult
from rankfold.methods.modegpt import mlp

MODES = ("sequential", "one-pass")
SPARSITY = dict.fromkeys(EXPERTS, 0.1)


def outcome_of(model) -> dict:
    return model.config.quantization_config.fields["held_out"]


def method_for(family: str, **options) -> MoDeGPT:
    return MoDeGPT(sparsity=SPARSITY.get(family, 0.3), rank_multiple=2, **options)


@pytest.fixture
def watched(monkeypatch):
    """Reports and errors of every block as the run made them, of all pieces of its step."""
    seen = {}
    decompose = stages.decompose

    def spy(stage, view, *rest):
        result = decompose(stage, view, *rest)
        whole = seen.setdefault(view.index, BlockResult())
        whole.reports.update(result.reports)
        whole.errors.update(result.errors)
        return result

    monkeypatch.setattr(stages, "decompose", spy)
    return seen


@pytest.mark.kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_perplexities_are_those_of_the_whole_models(family, mode):
    source, calibration = opened(family), tokens()
    model = rankfold.compress(source, method=method_for(family), calibration=calibration, mode=mode).model
    ours = outcome_of(model)
    dense, small = (rankfold.perplexity(m, calibration.held_out)["perplexity"] for m in (source.model, model))
    assert ours["perplexity_dense"] == pytest.approx(dense, rel=1e-4)
    assert ours["perplexity"] == pytest.approx(small, rel=1e-4)
    assert ours["ratio"] == pytest.approx(small / dense, rel=1e-4)
    assert (ours["windows"], ours["length"]) == (2, 32)
    assert ours["explained_ratio"] > 1


@torch.no_grad()
def drift_of(dense, small, ids) -> list[float]:
    """After every block but the last: the last hidden state is after the final norm."""
    pairs = zip(*(m(ids, output_hidden_states=True).hidden_states[1:-1] for m in (dense, small)), strict=True)
    return [((a - b).norm() / a.norm()).item() for a, b in pairs]


def test_drift_is_the_distance_of_the_residual_streams():
    source, calibration = opened("llama"), tokens()
    model = rankfold.compress(source, method=method_for("llama"), calibration=calibration).model
    ours = outcome_of(model)["stream_errors"]
    assert len(ours) == 3
    assert ours[:-1] == pytest.approx(drift_of(source.model, model, calibration.held_out), rel=1e-4)


def test_windows_in_several_batches_and_positions_in_several_parts_give_the_same_numbers(monkeypatch):
    """Two windows and one; logits of ten positions of a batch at a time, for a vocabulary is large."""
    calibration = CalibrationData(some_ids(16, 32, seed=1), "random", "random", 0, held_out=some_ids(3, 32, seed=2))
    monkeypatch.setattr(runner, "BATCH_TOKENS", 64)
    monkeypatch.setattr(likelihood, "POSITIONS", 10)
    plain, sizes = runner.outputs, set()

    def noting(*args, **options):
        out = plain(*args, **options)
        sizes.add(out.shape[:2])
        return out

    monkeypatch.setattr(runner, "outputs", noting)
    source = opened("llama")
    model = rankfold.compress(source, method=method_for("llama"), calibration=calibration).model
    assert sizes == {(2, 5), (2, 1), (1, 10), (1, 1)}
    ours = outcome_of(model)
    dense, small = (rankfold.perplexity(m, calibration.held_out)["perplexity"] for m in (source.model, model))
    assert (ours["perplexity_dense"], ours["perplexity"]) == pytest.approx((dense, small), rel=1e-4)
    assert ours["stream_errors"][:-1] == pytest.approx(drift_of(source.model, model, calibration.held_out), rel=1e-4)


@pytest.mark.parametrize(
    "name", ["modegpt", "modegpt selection=leverage,selection_qk=norm,gqa=paper,qk=cr,bias_refit=false"]
)
@pytest.mark.kinds
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_errors_on_the_fitted_windows_are_those_of_the_fit(family, name, watched):
    """The same numbers by the same words: only the windows differ between `relative_error` and `held_out_error`."""
    _, _, rest = name.partition(" ")
    options = {k: v == "true" if v in ("true", "false") else v for k, v in (o.split("=") for o in rest.split(",") if o)}
    calibration = tokens()
    same = CalibrationData(calibration.ids, "random", "random", 0, held_out=calibration.ids)
    rankfold.compress(opened(family), method=method_for(family, **options), calibration=same, mode="one-pass")
    assert len(watched) == 3
    for result in watched.values():
        assert result.errors.keys() == {m for m, r in result.reports.items() if r["rank"] < r["of"]}
        for module in result.errors:
            report = result.reports[module]
            assert report["held_out_error"] == pytest.approx(report["relative_error"], rel=2e-3, abs=2e-4), module


@pytest.mark.parametrize("mode", MODES)
def test_errors_are_measured_on_the_stream_that_was_fitted(mode, watched):
    """Sequential: what the compressed blocks send; one pass: the dense stream. Only windows that were held out."""
    source, calibration = opened("llama-bias"), tokens()
    model = rankfold.compress(source, method=method_for("llama-bias"), calibration=calibration, mode=mode).model
    stream = start(source, calibration.held_out, autocast=None)
    for index, result in watched.items():
        view = source.block(index)
        moments = measure(view, stream, method_for("llama-bias").statistics(view), step=False)
        for module, error in result.errors.items():
            assert result.reports[module]["held_out_error"] == pytest.approx(error(moments), rel=1e-4)
            assert result.reports[module]["held_out_error"] != pytest.approx(
                result.reports[module]["relative_error"], rel=1e-3
            )
        advance(view, stream, model.model.layers[index] if mode == "sequential" else None)


def test_a_run_that_destroys_the_model_says_so_everywhere(monkeypatch, tmp_path, caplog):
    """The wrong units stay in one block, and nothing makes up for them: a bug of the kind that training errors hide."""
    source, calibration = opened("llama"), tokens()
    fit = mlp.nystrom
    decompose = MoDeGPT.decompose

    def noting(self, view, *rest):
        if view.index == 1:
            monkeypatch.setattr(
                mlp, "nystrom", lambda W, C, **o: fit(W, C, **o)._replace(W_down=30 * W[:, : o["rank"]])
            )
        else:
            monkeypatch.setattr(mlp, "nystrom", fit)
        return decompose(self, view, *rest)

    monkeypatch.setattr(MoDeGPT, "decompose", noting)
    # Random models cannot get worse than guessing, so what counts as explained is set low.
    monkeypatch.setattr("rankfold.compression.held_out.explained_ratio", lambda sparsity: 0.5)
    with caplog.at_level(logging.WARNING):
        folder = rankfold.compress(
            source, method=method_for("llama"), calibration=calibration, output=tmp_path / "out"
        ).output
    record = json.loads((folder / "rankfold.json").read_text())
    warning = record["held_out"]["warning"]
    assert (
        "THE MODEL IS DAMAGED" in warning and "breaks away at block 1" in warning and "(exclude_blocks=(1,))" in warning
    )
    assert record["held_out"]["breaks_away_at"] == 1
    assert warning in caplog.text and warning in (folder / "README.md").read_text()
    assert outcome_of(rankfold.load(folder, device="cpu"))["warning"] == warning


@pytest.mark.parametrize(
    ("drift", "block"), [([0.3, 0.4, 0.45], 0), ([0.1, 0.5, 0.6], 1), ([0.1, 0.2, 0.9], 2), ([0.3, 0.2, 0.4], 0)]
)
def test_the_stream_breaks_away_where_it_drifts_most_at_once(drift, block, monkeypatch):
    monkeypatch.setattr(held_out, "explained_ratio", lambda sparsity: 0.5)
    watch = HeldOut(opened("llama"), some_ids(), sequential=True)
    watch.drift = drift
    assert watch.finish(0.3)["breaks_away_at"] == block


def test_a_sound_run_warns_of_nothing(caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        folder = rankfold.compress(
            opened("llama"), method=method_for("llama"), calibration=tokens(), output=tmp_path / "out"
        ).output
    record = json.loads((folder / "rankfold.json").read_text())
    assert record["held_out"]["warning"] is None and "DAMAGED" not in caplog.text + (folder / "README.md").read_text()


def test_moments_in_a_folder_bring_their_held_out_windows(tmp_path):
    source, calibration = opened("qwen2"), tokens()
    rankfold.calibrate(source, calibration, tmp_path / "moments")
    stored = rankfold.MomentStore.open(tmp_path / "moments")
    assert torch.equal(stored.held_out, calibration.held_out)
    a = rankfold.compress(source, method=method_for("qwen2"), moments=stored).model
    b = rankfold.compress(source, method=method_for("qwen2"), calibration=calibration, mode="one-pass").model
    assert outcome_of(a) == outcome_of(b)


def test_without_held_out_windows_the_record_says_that_nothing_was_checked(caplog, tmp_path):
    calibration = CalibrationData(some_ids(8, 32), "random", "random", 0)
    with caplog.at_level(logging.WARNING):
        folder = rankfold.compress(
            opened("llama"), method=method_for("llama"), calibration=calibration, output=tmp_path / "out"
        ).output
    record = json.loads((folder / "rankfold.json").read_text())
    assert record["held_out"] is None and "nothing checks the result" in caplog.text
    assert all("held_out_error" not in r for block in record["blocks"].values() for r in block.values())
    assert "not measured" in (folder / "README.md").read_text()


def test_what_a_sparsity_explains_grows_with_it():
    ratios = [explained_ratio(s / 10) for s in range(10)]
    assert ratios[0] == 1.05 and all(a < b for a, b in itertools.pairwise(ratios))
    assert math.isclose(ratios[3], 0.7**-3)


def test_a_model_that_loses_all_its_blocks_is_scored():
    """Blocks that send nothing cost nothing, so a measured allocation may take all of every one."""
    model = tiny_model("llama")
    for block in blocks_of(model):
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            torch.nn.init.zeros_(layer.weight)
    found = rankfold.compress(model, 0.3, rank_multiple=2, allow_module_removal=True, calibration=tokens())
    assert found.plan.sparsity == 1
    assert math.isclose(found.record["held_out"]["ratio"], 1, rel_tol=1e-6) and not found.record["held_out"]["warning"]


def test_every_method_reports_held_out_errors(watched):
    for name in ("latentllm", "rootcov"):
        watched.clear()
        rankfold.compress(opened("opt"), method=make_method(name, sparsity=0.3, rank_multiple=2), calibration=tokens())
        for result in watched.values():
            lower = {m for m, r in result.reports.items() if r["rank"] < r["of"]}
            assert lower and all(result.reports[m]["held_out_error"] > 0 for m in lower)


@pytest.mark.parametrize("name", ["modegpt", "flap", "latentllm"])
@pytest.mark.parametrize("family", ["llama-bias", "starcoder2"])
def test_outputs_that_never_vary_have_no_errors_above_one(family, name, watched):
    """One token all the time: where a bias takes up the mean, nothing is left but the rounding of sums."""
    calibration = CalibrationData(torch.full((8, 32), 7), "one", "one", 0, held_out=torch.full((2, 32), 7))
    rankfold.compress(opened(family), method=make_method(name, sparsity=0.3, rank_multiple=2), calibration=calibration)
    for result in watched.values():
        for module, report in result.reports.items():
            errors = [report[key] for key in ("relative_error", "held_out_error") if report.get(key) is not None]
            assert errors and all(0 <= error <= 1 + 1e-6 for error in errors), (module, errors)
