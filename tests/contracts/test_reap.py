"""Whole experts that go: saliency against a loop over tokens, and what is written against transformers' own class.

Shape legend: E experts, n tokens, k experts of a token, D model width.
"""

import json
import re

import pytest
import torch
import transformers as t
from test_experts import CONFIGS, OF_DEEPSEEK, PLAIN, TOP, E, experts_of, logits, look, model_of, one, opened, text
from torch import Tensor

import rankfold
from families import filled_cache, some_ids, tokens
from families import opened as opened_family
from rankfold import make_method
from rankfold._utils.evaluating import cache_for
from rankfold.architectures import BlockView
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.methods.baselines.reap import kept_experts

ROUTER = re.compile(
    r"(mlp|block_sparse_moe|feed_forward|mixer)\."
    r"((gate|router)\.(layer\.)?(weight|bias|e_score_correction_bias)|expert_bias)$"
    r"|\d\.router\.(proj\.weight|per_expert_scale)$"
)


def reference(model, ids: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Return the saliency and the energy of every expert, token by token in fp64."""
    module, routed = experts_of(model, index), look(model, ids, index)
    experts = [one(module, expert) for expert in range(E)]
    sums, squares, counts = (torch.zeros(E, dtype=torch.float64) for _ in range(3))
    for x, chosen, weights in zip(routed.tokens.double(), routed.chosen, routed.weights.double(), strict=True):
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            me = experts[expert]
            sent = me.down @ me.hidden(x[None])[0] + (0 if me.down_bias is None else me.down_bias)
            size = weight * sent.norm()
            sums[expert], squares[expert], counts[expert] = (
                sums[expert] + size,
                squares[expert] + size**2,
                counts[expert] + 1,
            )
    return sums / counts.clamp_min(1), squares


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def compressed(request, tmp_path_factory):
    """Return the family, the dense model, and what is left of it, written in one pass."""
    model, folder = model_of(request.param), tmp_path_factory.mktemp(request.param) / "small"
    found = rankfold.compress(opened(model), 0.15, method="reap", calibration=text(8), mode="one-pass", output=folder)
    return request.param, model, found


def test_the_experts_that_add_least_go(compressed):
    family, model, found = compressed
    blocks = found.record["blocks"]
    assert {int(index) for index, reports in blocks.items() if reports} == {
        index for index in range(3) if (family, index) not in PLAIN
    }
    for index, reports in blocks.items():
        if not reports:
            continue
        report, (scores, energies) = reports["expert_count"], reference(model, text(8).ids, int(index))
        torch.testing.assert_close(torch.tensor(report["saliency"]), scores.float(), rtol=1e-4, atol=1e-6)
        groups = 2 if family in OF_DEEPSEEK else 1
        keep = [
            expert
            for group in torch.arange(E).view(groups, -1)
            for expert in group[scores[group].argsort(descending=True)[: report["rank"] // groups]].tolist()
        ]
        assert report["kept"] == sorted(keep) and 0 < report["rank"] < E
        gone = (1 - energies[keep].sum() / energies.sum()).sqrt().item()
        assert report["relative_error"] == pytest.approx(gone, abs=1e-4) and report["held_out_error"] > 0


def test_what_is_left_is_a_stock_model_with_fewer_rows(compressed):
    _, model, found = compressed
    config = json.loads((found.output / "config.json").read_text())
    assert "quantization_config" not in config and not (found.output / "modeling_rankfold.py").exists()
    small, info = t.AutoModelForCausalLM.from_pretrained(found.output, output_loading_info=True)
    assert type(small) is type(model) and not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    before, after = model.state_dict(), small.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        block = name.partition("layers.")[2].partition(".")[0]
        report = found.record["blocks"][block].get("expert_count") if block else None
        has_rows = ".experts." in name or name.endswith("correction_bias") or ROUTER.search(name)
        rows = before[name].squeeze(0)  # ERNIE's correction is (1, experts)
        expected = rows[report["kept"]].view(tensor.shape) if report and has_rows else before[name]
        assert torch.equal(tensor, expected), name
    assert sum(p.numel() for p in small.parameters()) == found.plan.parameters_after < found.plan.parameters
    assert found.plan.sparsity >= 0.15
    assert logits(small).isfinite().all()


def test_few_are_left_for_each_token(tmp_path):
    """One of six experts stays: a token is sent to it alone, and the router's choice is none."""
    model = model_of("mixtral")
    found = rankfold.compress(opened(model), 0.55, method="reap", calibration=text(8), output=tmp_path / "small")
    small = t.AutoModelForCausalLM.from_pretrained(found.output)
    assert (small.config.num_local_experts, small.config.num_experts_per_tok) == (1, 1) and TOP == 2
    assert found.plan.active_parameters_after == found.plan.parameters_after < found.plan.active_parameters
    ids = some_ids(1, 12)
    cache = filled_cache(small, ids[:, :8])
    torch.testing.assert_close(
        small(ids[:, 8:], **cache_for(small, cache)).logits, small(ids).logits[:, 8:], atol=1e-4, rtol=1e-4
    )


def test_parameters_that_a_token_meets():
    """Fewer experts do not make a token meet fewer, but for rows of the router."""
    plan = rankfold.plan(opened(model_of("qwen3_moe")), 0.2, method="reap")
    removed = next(m for m in plan.modules)
    rows = (removed.of - removed.rank) * 32 * 3
    assert plan.active_parameters_after == plan.active_parameters - rows


def test_ties_and_groups():
    assert kept_experts(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 3]
    assert kept_experts(torch.tensor([5.0, 4.0, 3.0, 0.0, 1.0, 0.0]), 4, groups=2).tolist() == [0, 1, 3, 4]
    assert kept_experts(torch.zeros(4), 2).tolist() == [0, 1]


def test_groups_keep_their_sizes():
    view: BlockView = opened(model_of("deepseek_v3")).block(1)
    assert view.experts.counts == (4, 6)
    assert view.experts.describe_fewer(4)["config"] == {"num_local_experts": 4, "num_experts_per_tok": 2}


def check_killed_run(model, sparsity: float, place, monkeypatch, **how) -> None:
    """One that ends before it keeps the last block, and goes on, writes what a whole one does."""
    from rankfold.checkpoint.blocks import BlockFiles

    whole = rankfold.compress(opened(model), sparsity, output=place / "whole", **how).output
    save = BlockFiles.save_block

    def killed(self, index, *args):
        if index == 2:
            raise KeyboardInterrupt
        save(self, index, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockFiles, "save_block", killed)
        rankfold.compress(opened(model), sparsity, output=place / "again", **how)
    again = rankfold.compress(opened(model), sparsity, output=place / "again", **how).output
    for file in (*whole.glob("*.safetensors"), whole / "config.json"):
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_a_killed_run_ends_in_the_same_bytes(tmp_path, monkeypatch):
    check_killed_run(model_of("qwen2_moe"), 0.2, tmp_path, monkeypatch, method="reap", calibration=text(8))


def test_what_has_no_experts_and_what_goes_too_far():
    with pytest.raises(
        UnsupportedModelError, match="reap removes experts, and llama has none that rankfold can remove"
    ):
        rankfold.compress(opened_family("llama"), method="reap", calibration=tokens())
    with pytest.raises(OptionError, match="sparsity 0.9 cannot be reached: the chosen modules can lose at most"):
        rankfold.plan(opened(model_of("mixtral")), 0.9, method="reap")
    with pytest.raises(OptionError, match="method reap gives several blocks one width, basis or number of experts"):
        make_method("reap", exclude_blocks=(0,))
    with pytest.raises(OptionError, match="method reap takes allocation uniform, got owl"):
        make_method("reap", allocation="owl")
