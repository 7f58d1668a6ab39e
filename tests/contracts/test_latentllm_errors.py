"""The error every latent module reports, and its error on moments it was not fitted to."""

import pytest
import torch
from test_latentllm import method_for
from test_latentllm_options import OPTIONS, OPTIONS_FREE

import rankfold
from families import opened, some_ids, tokens
from rankfold.calibration.moments import Moment
from rankfold.calibration.runner import measure, start
from rankfold.linalg.joint_vo import attention_aware_output, joint_vo
from rankfold.linalg.lowrank import metric_error
from rankfold.linalg.rotations import rope_rotations
from rankfold.methods.latentllm.factor import prepare
from rankfold.modules import build
from tiny_encoders import opened_encoder, samples_of

FORMS = {
    "default": {},
    "local": {"joint": "none"},
    "no-refit": {"bias_refit": False},
    "window-0": {"window": 0},
    "vo": {"joint": "qk,vo"},
    "spectra": {"qk_ranks": "spectra"},
    "l2-left": {"precondition": "l2", "junction": "block_identity_left"},
} | OPTIONS
REFUSED = {("opt", "spectra"), ("llama", "joint-vo-aware")}
CASES = [(f, o) for f in ("opt", "llama", "llama-bias") for o in FORMS] + [("opt", o) for o in OPTIONS_FREE]


def decomposed(family: str, moments=None, **options):
    """Block 0 at half of every rank, the moments of the fit, and held-out ones."""
    source, method = opened(family, blocks=1), method_for(family, **options)
    view = source.block(0)
    names = method.statistics(view)
    windows = (tokens(32).ids, some_ids(8, seed=7))
    seen, other = (measure(view, start(source, ids, autocast=None), names, step=False) for ids in windows)
    ranks = {u.module: u.ranks[len(u.ranks) // 2] for u in method.prunable_modules(view)}
    return view, method.decompose(view, seen, ranks), seen, other


@pytest.mark.parametrize("family, option", CASES)
def test_errors_are_the_reported_ones_on_the_moments_of_the_fit_and_others_on_others(family, option):
    _, result, seen, other = decomposed(family, **(FORMS | OPTIONS_FREE)[option])
    latent = {m for m, r in result.reports.items() if r["rank"] < r["of"]}
    assert set(result.errors) >= latent and latent
    for module, error in result.errors.items():
        reported = result.reports[module]["relative_error"]
        assert error(seen) == pytest.approx(reported, rel=1e-6, abs=1e-6), module
        assert error(seen) > 1e-4, module
        assert error(other) != pytest.approx(reported, rel=1e-5), module


@pytest.mark.parametrize("form", [{"joint": "none"}, {}])
def test_scores_of_dense_queries_with_latent_keys_have_an_error_too(form):
    """Where a head's keys have an identity block, dense queries are turned with them."""
    source, method = opened("opt"), method_for("opt", head_junction=True, modules=("q", "k"), **form)
    view = source.block(0)
    seen, other = (
        measure(view, start(source, ids, autocast=None), method.statistics(view), step=False)
        for ids in (tokens(32).ids, some_ids(8, seed=7))
    )
    full, keys = (next(u for u in method.prunable_modules(view) if u.module == m) for m in ("q", "k"))
    result = method.decompose(view, seen, {"q": full.ranks[-1], "k": keys.ranks[len(keys.ranks) // 2]})
    reported, error = result.reports["k"]["relative_error"], result.errors["k"]
    assert reported > 1e-4 and error(seen) == pytest.approx(reported, rel=1e-6)
    assert error(other) != pytest.approx(reported, rel=1e-5)


def raw_moment(X) -> Moment:
    return Moment(len(X), X.sum(0), X.abs().sum(0), X.T @ X)


def runtime(result, view, module: str):
    """What runs in the compressed block, as a function of raw rows, in fp64."""
    spec = view.attention.spec
    own = module in "qkvo"
    path = f"{spec.path}.{module}_proj" if own else {"up": view.mlp.spec.up, "down": view.mlp.spec.down}[module]
    made = build(result.modules[spec.path][module] if own else result.modules[path])
    made.load_state_dict({k.removeprefix(f"{path}."): t for k, t in result.state.items() if k.startswith(f"{path}.")})
    return made.double()


def rms(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def raw(view, result, seed=3):
    """Held-out tokens, what dense and latent projections make of them, and their moments."""
    X = torch.randn(40, view.config.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X = X + X[:, :1] + 0.5
    dense = dict(zip("qkv", view.attention.qkv(), strict=True)) | {"o": view.attention.output}

    def apply(m, x):
        return x @ dense[m].weight.double().T + (0 if dense[m].bias is None else dense[m].bias.double())

    return X, {m: apply(m, X) for m in dense}, {m: runtime(result, view, m)(X) for m in dense}


@pytest.mark.parametrize("family", ["opt", "llama", "llama-bias"])
@pytest.mark.parametrize("option", ["local", "sparse", "sparse-alone", "bits-plain", "split", "no-refit"])
def test_local_errors_are_those_of_raw_outputs(family, option):
    view, result, _, _ = decomposed(family, **FORMS[option] | {"joint": "none"})
    X, before, after = raw(view, result)
    given = {"attention_input": raw_moment(X), "attention_output": raw_moment(X)}
    for module in "qkvo":
        bias = view.attention.output.bias if module == "o" else view.attention.qkv()["qkv".index(module)].bias
        moved = option != "no-refit" and bias is not None
        reference = before[module] - (before[module].mean(0) if moved else 0 if bias is None else bias.double())
        expected = (after[module] - before[module]).norm() / reference.norm()
        assert result.errors[module](given) == pytest.approx(expected.item(), rel=1e-6), module


@pytest.mark.parametrize("family, window", [("opt", 5), ("llama", 5), ("llama", 0), ("llama-bias", 5)])
def test_joint_score_errors_are_those_of_raw_scores(family, window):
    view, result, _, _ = decomposed(family, window=window)
    X, before, after = raw(view, result)
    attention = view.attention
    h = attention.head_dim
    theta = torch.eye(h, dtype=torch.float64)[None]
    if attention.rotary_dim and window:
        theta = rope_rotations(view.inv_freq.double(), h, window=window)
    biased = attention.qkv()[0].bias is not None

    def scores(found):
        q, k = (found[m].unflatten(1, (-1, h)) for m in "qk")
        return torch.einsum("mih,ohj,nij->oimn", q, theta, k.repeat_interleave(q.shape[1] // k.shape[1], 1))

    expected = rms(scores(after), scores(before))
    assert biased or attention.rotary_dim
    for module in "qk":
        assert result.errors[module]({"attention_input": raw_moment(X)}) == pytest.approx(expected, rel=1e-6)
        assert result.reports[module]["form"].startswith("joint qk")


def test_keys_ahead_count_as_those_behind_where_attention_is_not_causal():
    source, method = opened_encoder("modernbert-head"), method_for("llama")
    view = source.block(0)
    seen = rankfold.calibrate(source, samples_of(source), statistics=method.statistics(view))[0]
    result = method.decompose(view, seen, {"q": 16, "k": 16})
    X, before, after = raw(view, result)
    theta = rope_rotations(view.inv_freq.double(), view.attention.head_dim, window=5, causal=False)

    def scores(found):
        q, k = (found[m].unflatten(1, (-1, view.attention.head_dim)) for m in "qk")
        return torch.einsum("mih,ohj,nij->oimn", q, theta, k)

    expected = rms(scores(after), scores(before))
    assert result.errors["q"]({"attention_input": raw_moment(X)}) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "llama-mha-tied", "qwen2", "gpt_oss"])  # with biases of values that stay
def test_joint_value_output_errors_are_those_of_raw_heads(family):
    view, result, _, _ = decomposed(family, joint="vo")
    X, before, after = raw(view, result)
    h, H = view.attention.head_dim, view.attention.heads
    project, eye = runtime(result, view, "o"), torch.eye(H * h, dtype=torch.float64)
    W_o = view.attention.output.weight.double(), (project(eye) - project(0 * eye)).T

    def heads(values, W):
        values = values.unflatten(1, (-1, h))
        values = values.repeat_interleave(H // values.shape[1], 1)
        return torch.einsum("oih,nih->ino", W.unflatten(1, (H, h)), values)

    expected = rms(heads(after["v"], W_o[1]), heads(before["v"], W_o[0]))
    assert result.errors["v"]({"attention_input": raw_moment(X)}) == pytest.approx(expected, rel=1e-6)


def test_a_moved_mean_is_part_of_the_joint_value_output_error():
    view, result, seen, _ = decomposed("opt", joint="vo")
    error, moment = result.errors["o"], seen["attention_input"]
    moved = Moment(moment.count, moment.total + 0.3 * moment.count, None, None)
    C = moment.covariance() * moment.count  # the same covariance around another mean
    moved.second = C + torch.outer(moved.total, moved.total) / moment.count
    v, o = (view.attention.qkv()[2], view.attention.output), (runtime(result, view, "v"), runtime(result, view, "o"))
    mean = moved.mean

    def output(values, project):
        return project(values.unflatten(0, (-1, view.attention.head_dim)).flatten())

    with torch.no_grad():
        dense = v[1].weight.double() @ (v[0].weight.double() @ mean + v[0].bias.double()) + v[1].bias.double()
        shift = (output(o[0](mean), o[1]) - dense).square().sum().item()
        base = view.attention
        W_o = base.output.weight.double().unflatten(1, (base.heads, -1)).transpose(0, 1)
        W_v = v[0].weight.double().unflatten(0, (base.heads, -1))
        G = W_o @ W_v
        energy = ((G @ moment.covariance()) * G).sum().item()
    assert shift > 1e-6
    assert error({"attention_input": moved}) ** 2 == pytest.approx(error(seen) ** 2 + shift / energy, rel=1e-6)


@pytest.mark.parametrize("rows, form", [(40, "local (joint up-down was worse held out)"), (4000, "joint up-down")])
def test_joint_up_down_is_taken_where_it_is_better_held_out(rows, form):
    source, method = opened("opt"), method_for("opt")
    view = source.block(0)
    moments = measure(view, start(source, tokens(64).ids, autocast=None), method.statistics(view), step=False)
    g = torch.Generator().manual_seed(0)
    X = torch.randn(rows, 32, generator=g, dtype=torch.float64) @ torch.diag(torch.linspace(2, 0.1, 32).double())
    many = torch.randn(20000, 32, generator=g, dtype=torch.float64) @ torch.diag(torch.linspace(2, 0.1, 32).double())
    up = view.mlp.rising()[view.mlp.spec.up]
    activations = torch.relu(many @ up.weight.double().T + up.bias.double())
    moments |= {"mlp_input": raw_moment(many), "mlp_hidden": raw_moment(activations)}
    moments["mlp_samples"] = Moment(rows, None, None, None, X.float())
    ranks = {"up": 16, "down": 16}
    result = method.decompose(view, moments, ranks)
    fresh = torch.randn(5000, 32, generator=g, dtype=torch.float64) @ torch.diag(torch.linspace(2, 0.1, 32).double())
    with torch.no_grad():
        Y = torch.relu(fresh @ up.weight.double().T + up.bias.double()) @ view.mlp.down.weight.double().T
        Y = Y + view.mlp.down.bias.double()
        found = runtime(result, view, "down")(torch.relu(runtime(result, view, "up")(fresh)))
    for module in ranks:
        report = result.reports[module]
        assert report["form"] == form
        held_out = report["form_errors"]
        assert (held_out["joint"] > held_out["local"]) == form.startswith("local")
        taken = held_out["local" if form.startswith("local") else "joint"]
        assert rms(found, Y) == pytest.approx(taken, rel=0.25)  # the held-out rows speak for fresh ones
        if form == "joint up-down":
            samples = {"mlp_samples": Moment(5000, None, None, None, fresh)}
            assert result.errors[module](samples) == pytest.approx(rms(found, Y), rel=1e-6)
            assert report["training_error"] < held_out["joint"] * 1.1


@pytest.mark.parametrize("family", ["opt", "llama-bias"])
def test_the_attention_aware_bias_makes_the_mean_exact_and_the_error_that_of_the_regression(family):
    view, result, seen, other = decomposed(family, joint="vo", attention_aware=True)
    attention, method = view.attention, method_for(family)
    given = prepare(method, seen, "attention_input", centred=True)
    W_v = attention.qkv()[2].weight.double().unflatten(0, (attention.kv_heads, -1))
    W_o = attention.output.weight.double().unflatten(1, (attention.heads, -1)).transpose(0, 1)
    ranks = (result.reports["o"]["rank"], result.reports["v"]["rank"])
    fit = joint_vo(W_o, W_v, given.precond, ranks=ranks)
    sent = seen["attention_output"].covariance()
    refit = attention_aware_output(W_o, W_v, fit, given.precond, sent, rank=ranks[0])
    assert result.reports["o"]["relative_error"] == pytest.approx(refit.relative_error, rel=1e-6)
    W = attention.output.weight.double()
    gap = W - refit.B_o @ refit.A_o.transpose(0, 1).flatten(1) @ refit.E
    moved = gap @ (other["attention_output"].mean - seen["attention_output"].mean)  # the mean of the fit is exact
    expected = metric_error(gap, W, other["attention_output"].covariance(), shift=moved)
    assert result.errors["v"](other) == pytest.approx(expected, rel=1e-5)
