"""What must hold for methods that remove blocks, on every family; references are stock models that bypass blocks."""

import json

import pytest
import torch
import transformers as t
from torch import nn

import rankfold
import rankfold.compression.block_loss
from activations import blocks_of
from families import CONFIGS, KINDS, cached_numbers, opened, some_ids, tiny_model, tokens
from rankfold import make_method
from rankfold.compression.block_loss import losses_without
from rankfold.errors import OptionError

NAMES = ("shortgpt", "sleb")
REPEATS = {"falcon-gqa", "falcon-gqa-one-norm"}  # what transformers caches is repeated for every query head there


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """DenseModel, plan, folder and the model read back from it, one of three blocks removed."""
    source, method = opened(family), make_method("shortgpt", sparsity=0.3)
    folder, plans = tmp_path_factory.mktemp("removal") / "small", []
    rankfold.compress(source, method=method, calibration=tokens(), output=folder, on_plan=plans.append)
    return source, plans[0], folder, rankfold.load(folder, device="cpu")


def bypassed(model: nn.Module, gone) -> nn.Module:
    """The model with these blocks handing on what they receive."""

    def hand_on(_, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    for index in gone:
        blocks_of(model)[index].register_forward_hook(hand_on, with_kwargs=True)
    return model


@torch.no_grad()
def logits(model, ids=None):
    return model(some_ids() if ids is None else ids, use_cache=False).logits


def loss(model, ids) -> float:
    scores = logits(model, ids)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).item()


@torch.no_grad()
def influences(model, ids) -> list[float]:
    """One minus the mean cosine of each block's input and output, ShortGPT Eq. 1."""
    seen, found = {}, []
    for block in blocks_of(model):
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        block.register_forward_hook(
            lambda _, __, y: found.append(
                1
                - nn.functional.cosine_similarity(seen["x"], y[0] if isinstance(y, tuple) else y, dim=-1).mean().item()
            )
        )
    model(ids, use_cache=False)
    return found


def removed(plan) -> list[int]:
    return [m.block for m in plan.modules if m.rank == 0]


def test_the_block_with_least_influence_goes(run, family):
    expected = influences(tiny_model(family), tokens().ids)
    assert removed(run[1]) == [expected.index(min(expected))]
    assert run[1].facts["influence"] == pytest.approx({f"{i}.block": expected[i] for i in removed(run[1])}, rel=1e-3)


def test_the_dense_model_with_bypassed_blocks_computes_the_same(run, family):
    expected = logits(bypassed(tiny_model(family), removed(run[1])))
    torch.testing.assert_close(logits(run[3]), expected, rtol=1e-5, atol=1e-5)


def test_the_result_is_a_stock_model(run):
    source, _, folder, model = run
    config = json.loads((folder / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "auto_map"} and not list(folder.glob("*.py"))
    stock = t.AutoModelForCausalLM.from_pretrained(folder)
    assert type(stock) is type(source.model) and len(blocks_of(stock)) == len(blocks_of(model)) == 2
    assert stock.config.get_text_config().num_hidden_layers == 2
    assert torch.equal(logits(stock), logits(model))
    assert "import rankfold" not in (folder / "README.md").read_text()


def test_shards_are_numbered_without_gaps(run):
    names = sorted(path.name for path in run[2].glob("model-*.safetensors"))
    assert names == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.kinds
def test_folder_and_memory_and_saving_twice_give_the_same_model(run, tmp_path):
    source, _, folder, _ = run
    model = rankfold.compress(source, method=make_method("shortgpt", sparsity=0.3), calibration=tokens()).model
    assert torch.equal(logits(rankfold.load(folder, device="cpu")), logits(model))
    rankfold.save(model, tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))


def test_planned_equals_actual(run, family):
    source, plan, folder, model = run
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    attention = source.meta_block(0).attention
    repeated = attention.heads // attention.kv_heads if family in REPEATS else 1
    assert cached_numbers(model) * 4 == repeated * plan.kv_bytes_per_token_after


@pytest.mark.parametrize("of", ["blocks", "model"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_on_disk(name, of, tmp_path):
    """Norms go with their block; asked for in bytes they count."""
    source, plans = deep(), []
    method = make_method(name, sparsity=0.4, budget="bytes", scope=of)
    folder = rankfold.compress(
        source, method=method, calibration=tokens(), output=tmp_path / "small", on_plan=plans.append
    ).output
    index, found = json.loads((folder / "model.safetensors.index.json").read_text()), plans[0].budget
    dense = 4 * sum(p.numel() for p in source.model.parameters())
    assert found["counted"] == (dense if of == "model" else 4 * sum(p.numel() for p in source.blocks.parameters()))
    assert found["removed"] == dense - index["metadata"]["total_size"] >= found["asked"] >= 0.4 * found["counted"]
    block = found["removed"] // len(removed(plans[0]))
    assert found["removed"] - block < found["asked"], "one block fewer would have done"


@pytest.mark.parametrize("budget", ["flops", "latency"])
@pytest.mark.parametrize("name", NAMES)
def test_other_budgets_are_refused(name, budget):
    with pytest.raises(OptionError, match=f"method {name} takes budget parameters or bytes, got {budget}; take one of"):
        make_method(name, budget=budget)


def test_generation_with_cache_equals_without(run):
    ids, options = some_ids(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (
        run[3].generate(ids, attention_mask=torch.ones_like(ids), use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_the_error_is_of_the_stream_that_goes_past(run, family):
    record = json.loads((run[2] / "rankfold.json").read_text())["blocks"]
    (gone,) = removed(run[1])
    for i in range(3):
        assert record[str(i)]["block"]["rank"] == int(i != gone) and record[str(i)]["block"]["of"] == 1
        if i != gone:
            assert record[str(i)]["block"]["relative_error"] == 0.0
    for ids, key in ((tokens().ids, "relative_error"), (tokens().held_out, "held_out_error")):
        x, y = around(tiny_model(family), ids, gone)
        expected = ((y - x).norm() / y.norm()).item()
        assert record[str(gone)]["block"][key] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def around(model, ids, index: int):
    """Input and output of a block."""
    seen = {}

    def see(_, args, kwargs, y):
        seen.update(x=args[0] if args else kwargs["hidden_states"], y=y[0] if isinstance(y, tuple) else y)

    blocks_of(model)[index].register_forward_hook(see, with_kwargs=True)
    model(ids, use_cache=False)
    return seen["x"].double(), seen["y"].double()


def deep(blocks: int = 6):
    """A Llama of some blocks, in memory, and its source."""
    config = CONFIGS["llama"]()
    config.num_hidden_layers = blocks
    torch.manual_seed(3)
    model = t.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.2)
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    return source


def fresh(source) -> nn.Module:
    model = t.LlamaForCausalLM(source.model.config).eval()
    model.load_state_dict(source.model.state_dict())
    return model


def test_losses_are_those_of_the_bypassed_models():
    source, ids = deep(), some_ids(5, 32, seed=1)
    found = losses_without(source, ids, [3], {0, 1, 5})
    assert found.keys() == {0, 1, 5}
    for index, value in found.items():
        assert value == pytest.approx(loss(bypassed(fresh(source), [3, index]), ids), rel=1e-5)


def test_sleb_removes_one_after_another_what_is_missed_least():
    source, gone = deep(), []
    for _ in range(3):
        losses = {i: loss(bypassed(fresh(source), [*gone, i]), tokens().ids) for i in range(6) if i not in gone}
        gone.append(min(losses, key=losses.get))
    plan = rankfold.plan(source, method=make_method("sleb", sparsity=0.5), calibration=tokens())
    assert plan.facts["removed_as_number"] == {f"{block}.block": gone.index(block) + 1.0 for block in sorted(gone)}
    at_once = {i: loss(bypassed(fresh(source), [i]), tokens().ids) for i in range(6)}
    assert sorted(gone) != sorted(sorted(at_once, key=at_once.get)[:3]), "greedy would not show"


def test_several_blocks_of_the_least_influence_go_and_protected_ones_stay():
    source = deep()
    scores = influences(fresh(source), tokens().ids)
    order = sorted(range(6), key=lambda i: scores[i])
    for protect, expected in (((), order[:3]), ((order[0],), order[1:4])):
        method = make_method("shortgpt", sparsity=0.45, exclude_blocks=protect)
        plans = []
        rankfold.compress(source, method=method, calibration=tokens(), on_plan=plans.append)
        assert removed(plans[0]) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_runs_end_in_the_same_bytes(name, tmp_path, monkeypatch):
    method = make_method(name, sparsity=0.5)
    rankfold.compress(deep(), method=method, calibration=tokens(), output=tmp_path / "whole")
    save, search, rounds = rankfold.pipeline.run_stages, rankfold.compression.block_loss.losses_without, []

    def stop(work, view, ranks):
        if view.index == 4:
            raise KeyboardInterrupt
        return save(work, view, ranks)

    def counted(*args):
        rounds.append(args)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return search(*args)

    monkeypatch.setattr(rankfold.compression.block_loss, "losses_without", counted)
    if name == "sleb":
        with pytest.raises(KeyboardInterrupt):
            rankfold.compress(deep(), method=method, calibration=tokens(), output=tmp_path / "parts")
    monkeypatch.setattr(rankfold.pipeline, "run_stages", stop)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(deep(), method=method, calibration=tokens(), output=tmp_path / "parts")
    monkeypatch.setattr(rankfold.pipeline, "run_stages", save)
    rankfold.compress(deep(), method=method, calibration=tokens(), output=tmp_path / "parts")
    assert len(rounds) == (4 if name == "sleb" else 0), "what was found was looked for again"
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "parts").iterdir()}
    for file in names - {"rankfold.json", "README.md"}:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes(), file


def test_layer_types_go_with_their_blocks():
    config, types = CONFIGS["gemma3"](), ["sliding_attention", "full_attention", "sliding_attention"]
    config.layer_types = types
    source = rankfold.open_model(t.AutoModelForCausalLM.from_config(config), device="cpu")
    plans = []
    model = rankfold.compress(
        source, method=make_method("shortgpt", exclude_blocks=(1, 2)), calibration=tokens(), on_plan=plans.append
    ).model
    assert removed(plans[0]) == [0] and model.config.layer_types == types[1:]
    assert source.model.config.layer_types == types and source.model.config.num_hidden_layers == 3


def test_from_moments_the_same_blocks_go():
    source, method = deep(), make_method("shortgpt", sparsity=0.3)
    moments = rankfold.calibrate(source, tokens())
    a, b = (
        rankfold.compress(source, method=method, moments=moments).model,
        rankfold.compress(source, method=method, calibration=tokens()).model,
    )
    assert torch.equal(logits(a), logits(b))


def test_a_greedy_search_needs_text():
    source = deep(2)
    moments = rankfold.calibrate(source, tokens())
    with pytest.raises(OptionError, match="a greedy allocation compares predictions on text"):
        rankfold.compress(source, method=make_method("sleb"), moments=moments)


@pytest.mark.parametrize("name", NAMES)
def test_one_block_stays(name):
    what = r"sparsity 0.99 cannot be reached: .* at most .* sparsity 0.5000; lower the sparsity$"
    with pytest.raises(OptionError, match=what):
        rankfold.compress(deep(2), method=make_method(name, sparsity=0.99), calibration=tokens())


def test_other_allocations_are_refused():
    with pytest.raises(OptionError, match="method shortgpt takes allocation least-influence, got uniform"):
        make_method("shortgpt", allocation="uniform")
