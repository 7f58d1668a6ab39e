"""What sparse values do to a model: as corrections of a low rank, and alone."""

import pytest
import torch
from test_latentllm import logits, method_for
from test_latentllm_options import FAMILIES, compressed, distance, reports

import rankfold
from families import opened, tokens
from rankfold.methods.latentllm.layout import slots


@pytest.mark.parametrize("family", FAMILIES)
def test_little_sparse_is_close_to_none(family):
    local = {"joint": "none", "sparsity": 0.2}
    dense = logits(opened(family, 2).model)
    plain, some = (distance(logits(compressed(family, **local, **more)[0]), dense) for more in ({}, {"sparse": 0.02}))
    assert some < 1.2 * plain


@pytest.mark.parametrize("family", FAMILIES)
def test_the_more_values_stay_the_closer_is_a_sparse_model(family):
    dense = logits(opened(family, 2).model)
    errors = [distance(logits(compressed(family, sparse=1.0, sparsity=s)[0]), dense) for s in (0.02, 0.2, 0.5)]
    assert errors[0] < 0.2 * errors[2] and errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("shrink", ["hard", "soft", "ste", "diagonal"])
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_a_sparse_correction_has_its_share_of_the_planned_weights(shrink, share):
    _, _, _, ranks, result = reports("llama", sparse=share, shrink=shrink)
    method = method_for("llama", sparse=share)
    for module, slot in slots(method, opened("llama").block(0)).items():
        rank = ranks[module]
        assert result.reports[module]["nonzeros"] == slot.nonzeros(rank)
        assert abs(slot.nonzeros(rank) - share * slot.numbers(rank)) <= 1
        assert result.reports[module]["relative_error"] < 1


def test_corrected_outliers_beat_low_rank_alone():
    source = opened("llama")
    for parameter in source.model.model.layers.parameters():  # what a sparse correction is for
        if parameter.dim() == 2:
            where = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)) < 0.02
            parameter.data[where] *= 20
    moments = rankfold.calibrate(source, tokens(32))
    errors = {}
    for share in (0.0, 0.1):
        method = method_for("llama", sparse=share, joint="none", sparsity=0.4)
        result = method.decompose(source.block(0), moments[0], rankfold.plan(source, method=method).ranks(0))
        errors[share] = {m: r["relative_error"] for m, r in result.reports.items()}
    assert all(errors[0.1][m] < errors[0.0][m] for m in errors[0.0])
