"""What must hold for the default method on every family; references are raw activations of whole models.

Shape legend: n tokens, F input width of a projection, D model width.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, member, spliced, weight_of
from families import EXPERTS, KINDS, named, opened, some_ids, tiny_model, tokens
from rankfold import Rankfold
from rankfold.compression import kl_divergence
from rankfold.compression.budget import rank_options
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.compression.plan import shares
from rankfold.data.probes import Probes
from rankfold.errors import OptionError

ALL = KINDS
# What a projection sends is normalised before it is added.
NORM_BEHIND = {"gemma2", "gemma3", "gemma3-images", "opt-post-norm", "olmo2", "exaone4"}


def method_for(family: str, **options) -> Rankfold:
    return Rankfold(**{"sparsity": 0.3, "rank_multiple": 2, "modules": named(family)} | options)


def wide_tokens():
    """More tokens to hold out than the fits have degrees of freedom, so that some correction is confirmed."""
    return replace(tokens(32), held_out=some_ids(16, 32, seed=2))


@pytest.fixture(scope="module", params=ALL)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """Dense model, compressed one read back from its folder, and its record."""
    source = opened(family)
    folder = tmp_path_factory.mktemp("rankfold") / "small"
    rankfold.compress(source, method=method_for(family, allocation="uniform"), calibration=wide_tokens(), output=folder)
    return tiny_model(family), rankfold.load(folder, device="cpu"), json.loads((folder / "rankfold.json").read_text())


@torch.no_grad()
def streams(model, ids: Tensor, index: int) -> dict[str, Tensor]:
    """Rows of one block: its input, the stream between attention and MLP, its output, what its projections receive."""
    block, seen = blocks_of(model)[index], {}
    attention = member(block, ATTENTION)

    def sees(name):
        return lambda _, args: seen.update({name: args[0].flatten(0, -2)})

    output = member(attention, OUTPUT)
    hooks = [output.register_forward_pre_hook(sees("sent"))]
    hooks.append(output.register_forward_hook(lambda _, __, out: seen.update(attention=out.flatten(0, -2))))
    if down := member(block, DOWN):
        hooks.append(down.register_forward_pre_hook(sees("hidden")))

    def around(_, args, kwargs, out):
        seen["input"] = (args[0] if args else kwargs["hidden_states"]).flatten(0, -2)
        seen["output"] = (out[0] if isinstance(out, tuple) else out).flatten(0, -2)

    hooks.append(block.register_forward_hook(around, with_kwargs=True))
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: x.double() for name, x in seen.items()}


def missing_and_received(dense, small, ids: Tensor, index: int, family: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Module -> what the stream lacks before it, and what its projection receives, in a model compressed so far."""
    before = spliced(dense, small, range(index + 1))
    theirs, ours = (streams(model, ids, index) for model in (dense, before))
    found = {"vo": (theirs["input"] + theirs["attention"] - ours["input"], ours["sent"])}
    if family not in EXPERTS:
        found["mlp"] = (theirs["output"] - ours["input"] - ours["attention"], ours["hidden"])
    return found


def test_what_is_still_missing_is_what_the_record_says(run, family):
    """Installed projections on windows that were held out: dense stream, minus what is there, minus what they add."""
    dense, small, record = run
    corrected = 0
    for index in range(3):
        block, report = blocks_of(small)[index], record["blocks"][str(index)]
        text = wide_tokens()
        fitted, others = (missing_and_received(dense, small, x, index, family) for x in (text.ids, text.held_out))
        projections = {"vo": member(member(block, ATTENTION), OUTPUT), "mlp": member(block, DOWN)}
        for module in others:
            if family in NORM_BEHIND:
                assert "residual_correction" not in report[module]
                continue
            missing, received = others[module]
            projection = projections[module]
            left = missing - received @ weight_of(projection).double().T
            if projection.bias is not None:  # it takes the mean of what is missing from the fitted windows
                left, missing = left - projection.bias.double(), missing - fitted[module][0].mean(0)
            ratio = (left.square().sum() / missing.square().sum()).item()
            assert ratio == pytest.approx(report[module]["missing_after"], rel=2e-3), module
            corrected += report[module]["residual_correction"] > 0
    assert corrected or family in NORM_BEHIND


@pytest.mark.parametrize("name", ["opt", "llama-bias"])
def test_a_bias_that_stays_is_not_missing(name):
    method, text = method_for(name, bias_refit=False, allocation="uniform"), wide_tokens()
    result = rankfold.compress(opened(name), method=method, calibration=text)
    missing = missing_and_received(tiny_model(name), result.model, text.held_out, 0, name)
    block, report = blocks_of(result.model)[0], result.record["blocks"]["0"]
    for module, layer in {"vo": member(member(block, ATTENTION), OUTPUT), "mlp": member(block, DOWN)}.items():
        wanted, received = missing[module]
        wanted = wanted - layer.bias.detach().double()
        left = wanted - received @ weight_of(layer).double().T
        ratio = (left.square().sum() / wanted.square().sum()).item()
        assert ratio == pytest.approx(report[module]["missing_after"], rel=2e-3), module
        assert report[module]["residual_correction"] > 0
    assert report["vo"]["missing_before"] > report["vo"]["missing_after"]


def test_planned_equals_actual_and_the_budget_holds(run, family):
    dense, small, record = run
    parameters = sum(p.numel() for p in dense.parameters()) - sum(p.numel() for p in small.parameters())
    assert sum(p.numel() for p in small.parameters()) == record["counts"]["parameters"] and parameters > 0
    assert record["counts"]["sparsity"] >= method_for(family).sparsity


def test_sparsity_zero_leaves_the_logits_unchanged(family):
    source = opened(family)
    model = rankfold.compress(source, method=method_for(family, sparsity=0.0), calibration=tokens()).model
    with torch.no_grad():
        torch.testing.assert_close(model(some_ids()).logits, source.model(some_ids()).logits)


def rows_fitted(sent: Tensor, centred: bool) -> Tensor:
    return sent - sent.mean(0) if centred else sent


@pytest.mark.parametrize("name", ["llama", "opt", "llama-bias"])
def test_attention_aware_values_and_output_are_the_regression_on_what_attention_sends(name):
    """In the first block, whose input is the dense one, the output projection is the best one on the installed values.

    These keep more of what is sent than values fitted to themselves do.
    """
    shape = {"modules": {"vo": 0.5}, "rank_multiple": 2, "residual_correction": False, "allocation": "uniform"}
    losses = {}
    for aware in (True, False):
        source, text = opened(name), wide_tokens()
        small = rankfold.compress(source, method=Rankfold(**shape, attention_aware=aware), calibration=text).model
        dense = tiny_model(name)
        sent, reduced = (streams(model, text.ids, 0)["sent"] for model in (dense, small))
        projections = [member(member(blocks_of(m)[0], ATTENTION), OUTPUT) for m in (dense, small)]
        (W, b), (small_W, small_b) = ((p.weight.detach().double(), p.bias) for p in projections)
        wanted, found = sent @ W.T, reduced @ small_W.T
        if b is not None:
            wanted, found = wanted + b.detach().double(), found + small_b.detach().double()
        loss = (wanted - found).square().sum() / rows_fitted(wanted, b is not None).square().sum()
        x, y = (rows_fitted(rows, b is not None) for rows in (reduced, wanted))
        best = (y - x @ torch.linalg.lstsq(x, y).solution).square().sum() / y.square().sum()
        losses[aware] = loss.item()
        if aware:
            assert loss.item() == pytest.approx(best.item(), rel=5e-3)
    assert losses[True] < 0.97 * losses[False]


def test_in_the_papers_form_of_grouped_queries_values_do_not_look_at_the_output_projection():
    """What is kept of a value head are the leading eigenvectors of what it sends, over its query heads."""
    options = {"modules": {"vo": 0.5}, "rank_multiple": 2, "residual_correction": False, "allocation": "uniform"}
    source, text = opened("llama"), wide_tokens()
    small = rankfold.compress(source, method=Rankfold(**options, gqa="paper"), calibration=text).model
    sent = streams(tiny_model("llama"), text.ids, 0)["sent"].unflatten(1, (2, 2, 8))  # (n, K, G, N)
    W, reduced = (weight_of(blocks_of(m)[0].self_attn.v_proj).unflatten(0, (2, -1)) for m in (source.model, small))
    for k in range(2):
        rows = sent[:, k].flatten(0, 1)
        kept = torch.linalg.lstsq(W[k].T.double(), reduced[k].T.double()).solution  # (N, R)
        fit = rows @ kept @ torch.linalg.lstsq(rows @ kept, rows).solution
        least = torch.linalg.eigvalsh(rows.T @ rows)[: 8 - kept.shape[1]].sum()
        assert (rows - fit).square().sum().item() == pytest.approx(least.item(), rel=1e-3)


@pytest.mark.parametrize("module", ["mlp", "vo"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "exaone4", "glm4"])
def test_where_a_norm_follows_every_token_counts_alike(name, module):
    """In the first block: the installed projection is the best one of rows over the RMS of the dense one's outputs."""
    projection_of = {
        "mlp": lambda block: member(block, DOWN),
        "vo": lambda block: member(member(block, ATTENTION), OUTPUT),
    }
    beyond = {}
    for aware in (True, False):
        method = Rankfold(modules={module: 0.5}, rank_multiple=2, allocation="uniform", norm_aware=aware)
        small, text = rankfold.compress(opened(name), method=method, calibration=wide_tokens()).model, wide_tokens()
        found = {}
        for which, model in (("dense", tiny_model(name)), ("small", small)):
            rows = streams(model, text.ids, 0)["hidden" if module == "mlp" else "sent"]
            found[which] = rows, rows @ weight_of(projection_of[module](blocks_of(model)[0])).double().T
        wanted, (x, y) = found["dense"][1], found["small"]
        rms = wanted.square().mean(-1, keepdim=True).sqrt()
        x, y, wanted = x / rms, y / rms, wanted / rms
        best = (wanted - x @ torch.linalg.lstsq(x, wanted).solution).square().sum()
        beyond[aware] = ((wanted - y).square().sum() / best).item() - 1
    assert 0 <= beyond[True] < 0.2 * beyond[False]


def test_without_feedback_no_module_is_corrected(tmp_path):
    folder = rankfold.compress(
        opened("llama"),
        method=method_for("llama", residual_correction=False, allocation="uniform"),
        calibration=wide_tokens(),
        output=tmp_path / "plain",
    ).output
    blocks = json.loads((folder / "rankfold.json").read_text())["blocks"]
    assert all("residual_correction" not in report for block in blocks.values() for report in block.values())


def test_without_held_out_windows_nothing_confirms_a_correction(tmp_path):
    text = replace(wide_tokens(), held_out=None)
    options = {"allocation": "uniform", "attention_aware": False}
    same = [
        rankfold.compress(
            opened("llama"),
            method=method_for("llama", residual_correction=on, **options),
            calibration=text,
            output=tmp_path / str(on),
        ).output
        for on in (True, False)
    ]
    blocks = json.loads((same[0] / "rankfold.json").read_text())["blocks"]
    assert all(block[module]["residual_correction"] == 0.0 for block in blocks.values() for module in ("vo", "mlp"))
    for path in same[0].glob("*.safetensors"):
        assert path.read_bytes() == (same[1] / path.name).read_bytes()


def other_texts() -> Probes:
    """Four passages of two kinds, which a model without a tokenizer can read; the third is the longest of its kind."""
    return Probes(some_ids(4, 24, seed=3), (24, 20, 24, 21), ("prose", "prose", "web text", "web text"), "plain text")


PLAIN = [(name, 0.0) for name in ("llama", "gpt_neox", "opt", "mixtral", "gemma3")]


@pytest.mark.parametrize(("name", "share"), [("llama", 0.3), ("opt", 1.0), *PLAIN])
def test_costs_are_divergences_of_the_whole_model_with_one_module_compressed(name, share, monkeypatch):
    """At the rank that was tried; every other block protected, every other module left out.

    Texts of other kinds count as much as they are told to.
    """
    source, text = opened(name), wide_tokens()
    method, texts, counted = method_for(name), [text.held_out[:4]], [1.0]
    if share:
        monkeypatch.setattr(kl_divergence, "read_probes", lambda _: other_texts())
        texts, counted = [text.held_out[:8, :24], other_texts().ids[[0, 2]]], [1 - share, share]
    ranks = shares(rank_options(source, method), method)
    costs = measure_kl_sensitivity(source, method, text, *ranks, other_texts=share)

    @torch.no_grad()
    def predicted(model) -> list[Tensor]:
        return [model(ids).logits.log_softmax(-1) for ids in texts]

    dense = predicted(source.model)
    units, averages = shares(rank_options(source, method), method)
    for unit in (unit for unit in units if unit.module in method.all_modules):
        key = unit.block, unit.module
        tried = min(unit.ranks[:-1], key=lambda rank: abs(rank / unit.ranks[-1] - (1 - averages[key])))
        others = tuple(block for block in range(3) if block != unit.block)
        share = {unit.module: (1 - tried / unit.ranks[-1]) / 3}  # of this module in all three blocks
        options = {
            "residual_correction": False,
            "attention_aware": name == "gemma3",
        }  # what feedback follows is fitted without it
        alone = Rankfold(modules=share, rank_multiple=2, allocation="uniform", exclude_blocks=others, **options)
        assert rankfold.plan(source, method=alone).ranks(unit.block)[unit.module] == tried
        small = predicted(rankfold.compress(source, method=alone, calibration=text).model)
        apart = [(p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(dense, small, strict=True)]
        divergence = sum(part * each for part, each in zip(counted, apart, strict=True))
        assert costs[key][tried] == pytest.approx(divergence, rel=2e-3, abs=1e-7), key
        assert costs[key][unit.ranks[-1]] == 0.0
        falling = [costs[key][rank] for rank in sorted(costs[key]) if rank]
        assert falling == sorted(falling, reverse=True)


def test_a_model_that_reads_no_other_texts_is_refused():
    method = method_for("llama", allocation="measured:other_texts=0.5")
    with pytest.raises(OptionError, match=r"reads none: the model came without a tokenizer; leave other_texts out$"):
        rankfold.compress(opened("llama"), method=method, calibration=tokens())


def test_units_that_do_nothing_make_no_other_rank_free():
    """The rank that all would have loses none but them; the cost of smaller ones is measured all the same."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, ::3] = 0
    source, text = rankfold.open_model(model, device="cpu"), wide_tokens()
    method = method_for("llama", sparsity=0.2)
    costs = measure_kl_sensitivity(source, method, text, *shares(rank_options(source, method), method))[1, "mlp"]
    alive = max(costs) * 2 // 3
    assert min(costs) < alive - 2 and costs[alive] == pytest.approx(0, abs=1e-9)
    paid = [costs[rank] for rank in sorted(costs) if rank < alive]
    assert min(paid) > 1e-6 and paid == sorted(paid, reverse=True)


def test_resumed_runs_find_the_same_ranks(tmp_path, monkeypatch):
    """Costs are kept with an unfinished run, and read again."""
    from rankfold import pipeline
    from rankfold.compression import importance as scores
    from rankfold.compression import kl_divergence as effects

    source, method = opened("llama"), method_for("llama")
    whole = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "whole").output
    run_stages, calls = pipeline.run_stages, []

    def dies(work, view, *rest):
        if view.index == 1:
            raise KeyboardInterrupt
        return run_stages(work, view, *rest)

    monkeypatch.setattr(pipeline, "run_stages", dies)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed")
    monkeypatch.setattr(pipeline, "run_stages", run_stages)
    monkeypatch.setattr(
        scores, "measure_kl_sensitivity", lambda *a, **b: calls.append(a) or effects.measure_kl_sensitivity(*a, **b)
    )
    resumed = rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "killed").output
    assert not calls
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (resumed / path.name).read_bytes()
    assert not (resumed / "costs.json").exists()


def test_moments_and_one_pass_are_refused_with_what_to_do():
    source = opened("llama")
    store = rankfold.calibrate(source, tokens())
    for how in ({"moments": store}, {"calibration": tokens(), "mode": "one-pass"}):
        with pytest.raises(OptionError, match="takes text and mode sequential.*method='modegpt'"):
            rankfold.compress(source, method=method_for("llama"), **how)
    with pytest.raises(OptionError, match="compares predictions on text"):
        rankfold.compress(source, method=rankfold.MoDeGPT(allocation="measured", rank_multiple=2), moments=store)
