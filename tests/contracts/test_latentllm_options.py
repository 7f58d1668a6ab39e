"""What must hold for the options of the latent methods: quantised, sparse, shared, split, per head, by spectra."""

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from test_latentllm import logits, method_for

import rankfold
from families import filled_cache, opened, some_ids, tiny_model, tokens
from rankfold.calibration.runner import advance, start
from rankfold.compression.replace import replace
from rankfold.errors import OptionError
from rankfold.linalg.junction import JUNCTIONS as JUNCTIONS_OF_FACTORS
from rankfold.linalg.quantization import dequantize
from rankfold.methods.latentllm import refining, storing
from rankfold.methods.latentllm.factor import prepare
from rankfold.methods.latentllm.layout import dense_projections
from rankfold.methods.latentllm.refining import refined_codes, rounded_codes
from rankfold.modules import CompressedAttention, QuantizedTensor, build

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "opt", "gpt2", "phi", "gpt_neox", "falcon-gqa"]
FREE = ["opt", "gpt2", "bloom", "falcon-alibi"]  # nothing sits between keys and scores
OPTIONS = {
    "bits": {"bits": 4, "chunk": 16},
    "bits-odd-lu": {"bits": 3, "chunk": 7, "junction": "lu"},
    "bits-plain": {"bits": 5, "junction": "symmetric", "joint": "none"},
    "bits-joint-vo": {"bits": 8, "joint": "vo"},
    "joint-vo-aware": {"joint": "vo", "attention_aware": True},
    "sparse": {"sparse": 0.15},
    "sparse-alone": {"sparse": 1.0},
    "sparse-bits": {"sparse": 0.1, "bits": 6, "junction": "right"},
    "shared": {"shared_qkv": True},
    "shared-all": {"shared_qkv": True, "bits": 7, "sparse": 0.1, "junction": "block_identity_left"},
    "shared-bits-lu": {"shared_qkv": True, "bits": 8, "junction": "lu"},
    "split": {"split_head": True, "junction": "block_identity_left"},
    "split-bits": {"split_head": True, "junction": "symmetric", "bits": 4},
    "head": {"head_junction": True},
    "head-bits-vo": {"head_junction": True, "bits": 8, "joint": "vo"},
}
OPTIONS_FREE = {
    "head-joint-vo-aware": {"head_junction": True, "joint": "vo", "attention_aware": True},
    "head-bits": {"head_junction": True, "bits": 8, "chunk": 16},
    "head-plain-local": {"head_junction": True, "junction": "symmetric", "joint": "none", "bits": 2},
    "head-dense-queries": {"head_junction": True, "modules": {"q": 0.0, "k": 0.3}},
    "head-dense-output": {"head_junction": True, "modules": {"v": 0.15, "o": 0.0}},
}
REFUSED = ("qwen2", "joint-vo-aware")  # its output projection has no bias; see `test_what_cannot_be_done_is_said`
EVERY_OPTION = {"llama", "opt"}


def some_of(families, options) -> list[tuple[str, str]]:
    """Every option on two families, and every third one on each of the others."""
    pairs = [(f, o, i + j) for i, f in enumerate(families) for j, o in enumerate(options)]
    return [(f, o) for f, o, place in pairs if f in EVERY_OPTION or place % 3 == 0]


MATRIX = [case for case in some_of(FAMILIES, OPTIONS) + some_of(FREE, OPTIONS_FREE) if case != REFUSED]
JUNCTIONS = ["block_identity_right", "block_identity_left", "lu", "symmetric"]


@pytest.fixture
def few_steps(monkeypatch):
    """Refine codes in 4 steps, not 30: for what holds of any codes."""
    monkeypatch.setattr(refining, "refine_factors", functools.partial(refining.refine_factors, steps=4))


def compressed(family: str, blocks: int = 2, **options):
    source, method = opened(family, blocks), method_for(family, **options)
    return rankfold.compress(source, method=method, calibration=tokens(32)).model, rankfold.plan(source, method=method)


def numbers(model) -> int:
    """Parameters, quantised ones included."""
    quantised = sum(m.numel for m in model.modules() if isinstance(m, QuantizedTensor))
    return sum(p.numel() for p in model.parameters()) + quantised


def bytes_of(folder) -> int:
    tensors = [t for file in folder.glob("*.safetensors") for t in load_file(file).values()]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.kinds
@pytest.mark.parametrize("family, option", MATRIX)
def test_counts_bytes_round_trips_cache_and_generation(family, option, tmp_path, few_steps):
    model, plan = compressed(family, **(OPTIONS | OPTIONS_FREE)[option])
    assert numbers(model) == plan.parameters_after
    assert "dense" in option or plan.sparsity >= 0.3

    rankfold.save(model, tmp_path / "small")
    assert bytes_of(tmp_path / "small") == plan.bytes_after
    again = rankfold.load(tmp_path / "small", device="cpu")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))

    ids = some_ids()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    cached = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings))
    with torch.no_grad():
        cache = filled_cache(model, ids)
    widths = [t.shape[1] * t.shape[3] for layer in cache.layers for t in (layer.keys, layer.values)]
    assert sum(widths) * 4 == plan.kv_bytes_per_token_after


@pytest.mark.parametrize("option", ["bits", "sparse-alone", "sparse-bits", "shared-all", "head-bits"])
def test_written_block_by_block_in_bf16(option, tmp_path, few_steps):
    source = rankfold.open_model(tiny_model("opt", blocks=2).to(torch.bfloat16), device="cpu")
    method = method_for("opt", **(OPTIONS | OPTIONS_FREE)[option])
    rankfold.compress(source, method=method, calibration=tokens(32), output=tmp_path / "small")
    plan = rankfold.plan(source, method=method)
    assert bytes_of(tmp_path / "small") == plan.bytes_after
    model = rankfold.load(tmp_path / "small", device="cpu")
    assert model.dtype == torch.bfloat16 and torch.isfinite(logits(model)).all()
    rankfold.save(rankfold.compress(source, method=method, calibration=tokens(32)).model, tmp_path / "memory")
    assert torch.equal(logits(rankfold.load(tmp_path / "memory", device="cpu")), logits(model))
    wide = logits(rankfold.load(tmp_path / "small", dtype="float32", device="cpu"))
    assert (logits(model).float() - wide).norm() < 0.03 * wide.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(copy.deepcopy(model).float()).float() - wide).norm() < 0.03 * wide.norm()


def test_heads_of_identities_alone_have_no_codes(tmp_path):
    settings = {"head_junction": True, "modules": {"q": 0.2, "k": 0.8125}}
    model, plan = compressed("opt", bits=8, **settings)
    rests = {m.numel for name, m in model.named_modules() if name.endswith("k_proj.B.rest")}
    assert rests == {0} and numbers(model) == plan.parameters_after
    assert distance(logits(model), logits(compressed("opt", **settings)[0])) < 0.06
    rankfold.save(model, tmp_path / "small")
    assert torch.equal(logits(rankfold.load(tmp_path / "small", device="cpu")), logits(model))


def distance(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family, junction", some_of(FAMILIES, JUNCTIONS))
def test_eight_bits_are_close_to_none_and_more_bits_are_closer(family, junction, few_steps):
    settings = {"junction": junction, "chunk": 16}
    plain = logits(compressed(family, blocks=1, **settings)[0])
    errors = [distance(logits(compressed(family, blocks=1, bits=bits, **settings)[0]), plain) for bits in (3, 5, 8)]
    assert errors[2] < 0.06 and errors[0] > errors[1] > errors[2]


def reports(family: str, **options):
    """Moments of block 0, its view, and the reports of a method at the planned ranks."""
    source, method = opened(family, blocks=1), method_for(family, **options)
    moments = rankfold.calibrate(source, tokens(32))
    ranks = rankfold.plan(source, method=method).ranks(0)
    result = method.decompose(source.block(0), moments[0], ranks)
    return source.block(0), moments[0], method, ranks, result


@pytest.mark.parametrize(
    "option", ["bits", "bits-odd-lu", "bits-plain", "sparse", "sparse-alone", "sparse-bits", "shared-all", "split-bits"]
)
def test_the_error_reported_is_that_of_what_is_stored(option):
    view, moments, method, _, result = reports("llama-bias", **OPTIONS[option] | {"joint": "none"})
    dense, attention = dense_projections(method, view), result.modules["self_attn"]
    specs = {"up": result.modules["mlp.up_proj"], "down": result.modules["mlp.down_proj"]} | attention
    statistic = {"o": "attention_output", "down": "mlp_hidden", "up": "mlp_input"}
    for module in [m for m, report in result.reports.items() if m != "gate" and report["form"] != "dense"]:
        path = f"mlp.{module}_proj." if module in ("up", "down") else f"self_attn.{module}_proj."
        runtime = build(specs[module])
        state = {k.removeprefix(path): t for k, t in result.state.items() if k.startswith(path)}
        runtime.load_state_dict(state)
        with torch.no_grad():
            weight = (runtime(torch.eye(specs[module]["in"])) - runtime.bias).T.double()
        W, given = (
            dense[module].weight.double(),
            prepare(method, moments, statistic.get(module, "attention_input"), centred=True),
        )
        error = (((W - weight) @ given.C) * (W - weight)).sum() / ((W @ given.C) * W).sum()
        assert result.reports[module]["relative_error"] == pytest.approx(error.sqrt().item(), rel=1e-3)
        mean = W @ given.mean + dense[module].bias.double()  # a bias makes the mean output exact, rounding included
        torch.testing.assert_close(weight @ given.mean + runtime.bias.double(), mean, rtol=1e-4, atol=1e-4)


FORMS = {
    "auto": {},
    "local": {"joint": "none"},
    "joint qk and vo": {"joint": "qk,vo"},
    "attention aware": {"joint": "vo", "attention_aware": True},
    "shared": {"shared_qkv": True},
    "split": {"split_head": True},
    "per head": {"head_junction": True},
    "per head, local": {"head_junction": True, "joint": "none"},
    "per head, joint vo": {"head_junction": True, "joint": "vo"},
    "per head, aware": {"head_junction": True, "joint": "vo", "attention_aware": True},
    "sparse": {"sparse": 0.1},
    "no refit": {"bias_refit": False},
}


@functools.cache
def measured(family: str):
    source = opened(family, blocks=1)
    forms = [options for name, options in FORMS.items() if family == "opt" or "aware" not in name]
    methods = [method_for(family, junction="symmetric", **options) for options in forms]
    wanted = [method.statistics(source.block(0)) for method in methods]
    return source, rankfold.calibrate(source, tokens(32), statistics=set().union(*wanted))[0]


def built(view, result, module: str):
    """The runtime module of a projection, with what is stored of it."""
    spec = view.mlp.spec
    path = {"up": spec.up, "gate": spec.gate, "down": spec.down}.get(module)
    described = result.modules[path] if path else result.modules[view.attention.spec.path][module]
    path = path or f"{view.attention.spec.path}.{module}_proj"
    runtime = build(described)
    runtime.load_state_dict({k[len(path) + 1 :]: t for k, t in result.state.items() if k.startswith(f"{path}.")})
    return runtime


@pytest.mark.parametrize("junction", JUNCTIONS_OF_FACTORS)
@pytest.mark.parametrize(
    "family, form",
    [("opt", f) for f in FORMS] + [("llama", "joint qk and vo"), ("llama", "shared"), ("llama", "per head")],
)
def test_factors_of_every_junction_and_form_are_refined(family, form, junction, monkeypatch):
    try:
        method = method_for(family, bits=3, chunk=16, junction=junction, **FORMS[form])
    except OptionError as error:
        assert "takes the junctions" in str(error)
        return
    source, moments = measured(family)
    ranks, made = rankfold.plan(source, method=method).ranks(0), {}

    def refine(slot, fit, numbers, indices):
        made[slot.name] = refined_codes(slot, fit, numbers, indices)
        return made[slot.name]

    monkeypatch.setattr(storing, "refined_codes", refine)
    refined = method.decompose(source.block(0), moments, ranks)
    monkeypatch.setattr(storing, "refined_codes", lambda slot, fit, numbers, indices: rounded_codes(slot, numbers))
    rounded = method.decompose(source.block(0), moments, ranks)
    lower = []
    for module, report in refined.reports.items():
        if report["form"] == "dense":
            continue
        assert report["rounded_error"] == pytest.approx(rounded.reports[module]["relative_error"], rel=1e-9)
        assert report["relative_error"] <= report["rounded_error"] * (1 + 1e-6)
        lower.append(report["relative_error"] < 0.9999 * report["rounded_error"])
        if report["quantisation"] == "refined":
            runtime = built(source.block(0), refined, module)
            held = {n: m for n, m in runtime.named_modules() if isinstance(m, QuantizedTensor)}
            assert held.keys() == made[module].keys()
            for name, codes in made[module].items():
                assert torch.equal(held[name].weight.flatten(), dequantize(codes).flatten())
                assert torch.equal(held[name].unpack(), codes.codes)
    assert sum(lower) >= len(lower) - 1 and lower


def test_a_shared_latent_is_cached_once():
    for family, expected in (("opt", (True, True)), ("llama-mha-tied", (False, True)), ("qwen3", (False, True))):
        model, plan = compressed(family, shared_qkv=True, sparsity=0.6)
        attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
        assert (attention.latent_keys, attention.latent_values) == expected, family
        rank, width = plan.ranks(0)["qkv"], attention.kv_heads * attention.qk_dim
        with torch.no_grad():
            layer = filled_cache(model, some_ids()).layers[0]
        found = [t.shape[1] * t.shape[3] for t in (layer.keys, layer.values)]
        assert found == ([rank, 0] if expected[0] else [width, rank])


@pytest.mark.parametrize("family", [*FREE, "llama", "qwen3"])
@pytest.mark.parametrize("joint", ["auto", "none", "vo"])
def test_a_per_head_identity_changes_no_output_and_saves_its_numbers(family, joint):
    source = opened(family, blocks=1)
    plain, saving = (method_for(family, joint=joint, head_junction=on) for on in (False, True))
    moments = rankfold.calibrate(source, tokens(32))
    ranks = {u.module: u.ranks[len(u.ranks) // 2] for u in saving.prunable_modules(source.block(0))}
    outputs, stored = [], []
    for method in (plain, saving):
        view, stream = source.block(0), start(source, some_ids(), autocast=None)
        replace(view, method.decompose(view, moments[0], ranks), source)
        advance(view, stream)
        outputs.append(stream.hidden[0])
        stored.append(numbers(view.module))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    attention = source.block(0).attention
    pairs = 2 if family in FREE else 1  # of the families that rotate or normalise keys, values alone
    assert stored[0] - stored[1] == pairs * attention.kv_heads * attention.head_dim**2


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "falcon-gqa"])
@pytest.mark.parametrize("junction", ["block_identity_right", "lu"])
def test_ranks_by_spectra_stay_within_the_plan(family, junction, tmp_path):
    source, method = opened(family, blocks=2), method_for(family, qk_ranks="spectra", junction=junction, sparsity=0.4)
    folder = rankfold.compress(source, method=method, calibration=tokens(32), output=tmp_path / "small").output
    plan = rankfold.plan(source, method=method)
    record, model = json.loads((folder / "rankfold.json").read_text()), rankfold.load(folder, device="cpu")
    less = 0
    for block in record["blocks"].values():
        q, k = block["q"], block["k"]
        assert q["weights"] + k["weights"] <= q["planned_weights"] + k["planned_weights"]
        less += q["planned_weights"] + k["planned_weights"] - q["weights"] - k["weights"]
    assert numbers(model) == plan.parameters_after - less
    with torch.no_grad():
        cache = filled_cache(model, some_ids())
    widths = [t.shape[1] * t.shape[3] for layer in cache.layers for t in (layer.keys, layer.values)]
    assert sum(widths) * 4 <= plan.kv_bytes_per_token_after


def test_ranks_by_spectra_never_have_more_error_than_those_of_the_plan():
    source = opened("opt", blocks=1)
    view, methods = source.block(0), [method_for("opt", qk_ranks=ranks) for ranks in ("plan", "spectra")]
    moments = rankfold.calibrate(source, tokens(32), statistics=methods[0].statistics(view))[0]
    for ranks in ({"q": 4, "k": 2}, {"q": 6, "k": 4}, {"q": 10, "k": 10}):
        planned, chosen = (method.decompose(view, moments, ranks).reports["q"] for method in methods)
        assert chosen["relative_error"] <= planned["relative_error"]
        assert chosen["rank"] == chosen["planned_rank"] or chosen["relative_error"] < planned["relative_error"]


def test_spectra_where_keys_are_normalised_leave_the_plan_as_it_is():
    model, plan = compressed("qwen3", qk_ranks="spectra")
    assert numbers(model) == plan.parameters_after
