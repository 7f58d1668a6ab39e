"""Perplexity against the model's own loss and against probabilities multiplied out by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from rankfold.errors import DataError, NumericsError
from rankfold.evaluation.perplexity import DEFINITION, perplexity, windows_of
from rankfold.evaluation.text import Texts

VOCABULARY = 61


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def by_hand(model, windows) -> float:
    """Token by token: the probability of each next token given all before it in its window, multiplied out in fp64."""
    log_likelihood, predicted = 0.0, 0
    with torch.no_grad():
        for window in windows:
            for t in range(1, len(window)):
                probabilities = model(window[None, :t]).logits[0, -1].double().softmax(-1)
                log_likelihood += math.log(probabilities[window[t]].item())
                predicted += 1
    return math.exp(-log_likelihood / predicted)


def test_perplexity_is_the_inverse_geometric_mean_probability(model):
    windows = windows_of(ids(40), 8)
    out = perplexity(model, windows)
    assert out["perplexity"] == pytest.approx(by_hand(model, windows), rel=1e-5)
    assert out["perplexity"] == pytest.approx(math.exp(out["nll"]))
    assert (out["windows"], out["length"], out["tokens"], out["definition"]) == (5, 8, 35, DEFINITION)


def test_perplexity_is_the_models_own_loss(model):
    windows = windows_of(ids(320), 32)
    with torch.no_grad():
        losses = [model(w[None], labels=w[None]).loss.double() for w in windows]
    assert perplexity(model, windows)["nll"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_dropout_is_off_and_the_mode_stays():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    config = OPTConfig(**shape, vocab_size=VOCABULARY, num_attention_heads=2, dropout=0.5)
    model = OPTForCausalLM(config).train()
    windows = windows_of(ids(64), 16)
    found = perplexity(model, windows)
    assert model.training and model.model.decoder.layers[0].training
    assert found == perplexity(model, windows) == perplexity(model.eval(), windows)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(model):
    import copy

    blank = copy.deepcopy(model)
    torch.nn.init.zeros_(blank.lm_head.weight)
    assert perplexity(blank, windows_of(ids(64), 16))["perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize("tokens", [8, 17, 10**6])
def test_batching_does_not_matter(model, monkeypatch, tokens):
    windows = windows_of(ids(96), 8)
    reference = perplexity(model, windows)
    monkeypatch.setattr("rankfold.evaluation.perplexity.BATCH_TOKENS", tokens)
    assert perplexity(model, windows)["nll"] == pytest.approx(reference["nll"], rel=1e-6)


def test_windows_do_not_see_each_other(model):
    windows = windows_of(ids(24), 8)
    alone = [perplexity(model, w[None])["nll"] for w in windows]
    assert perplexity(model, windows)["nll"] == pytest.approx(sum(alone) / 3, rel=1e-6)
    assert perplexity(model, windows.flip(0))["nll"] == pytest.approx(sum(alone) / 3, rel=1e-6)


def test_autocast_is_close_and_the_weights_stay(model):
    windows = windows_of(ids(64), 16)
    before = {n: p.clone() for n, p in model.named_parameters()}
    out = perplexity(model, windows, autocast=torch.bfloat16)
    assert out["nll"] == pytest.approx(perplexity(model, windows)["nll"], rel=0.05)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 100), st.integers(2, 30), st.one_of(st.none(), st.integers(1, 10)))
def test_windows_are_the_text_in_order_without_its_rest(n, length, limit):
    stream = torch.arange(n)
    if n < length:
        with pytest.raises(
            DataError, match=rf"the text has {n} tokens?, less than one sample of {length}; use a smaller"
        ):
            windows_of(stream, length, limit)
        return
    out = windows_of(stream, length, limit)
    assert len(out) == min(n // length, limit or n)
    assert torch.equal(out.flatten(), stream[: out.numel()])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_and_not_a_number(model, value):
    import copy

    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[0] = value
    with pytest.raises(
        NumericsError, match="loss is NaN or infinite on the evaluation text; check the checkpoint or dtype"
    ):
        perplexity(broken, windows_of(ids(64), 16))


def test_one_bad_window_is_not_averaged_away(model):
    import copy

    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[7] = float("nan")
    stream = torch.full((640,), 3)
    stream[-2] = 7
    with pytest.raises(NumericsError, match="loss is NaN or infinite"):
        perplexity(broken, windows_of(stream, 16))


def test_a_perplexity_beyond_floating_point_is_an_error_with_a_name(model):
    """A mean loss above 709 nats is finite, its exponential is not."""
    import copy

    broken = copy.deepcopy(model)
    broken.lm_head.weight.data *= 1e4
    with pytest.raises(NumericsError, match="loss"):
        perplexity(broken, windows_of(ids(64), 16))


def test_a_window_of_one_token_predicts_nothing():
    with pytest.raises(DataError, match="a sample of 1 token predicts none"):
        windows_of(torch.arange(9), 1)


@pytest.mark.parametrize("rows, wanted, times", [(200, 16, 2), (3, 1, 1)])
def test_a_limit_is_met_where_tokens_are_long(tmp_path, rows, wanted, times):
    """Logs and padded tables have tokens of 20 characters, so more of the file is read than for most texts; of one that
    was read as a whole there is no more."""
    row = json.dumps({"text": "=" * 1278})
    (tmp_path / "log.jsonl").write_text("\n".join([row] * rows), encoding="utf-8")

    tokenised = []

    def tokenizer(text, **_):
        tokenised.append(text)
        return SimpleNamespace(input_ids=torch.arange(len(text) // 20)[None] % 50)

    texts = Texts((str(tmp_path / "log.jsonl"),), max_length=128, limit=16)
    windows = texts.windows_of(*texts.read(), tokenizer, "model", LlamaConfig(vocab_size=50), 128)
    assert len(windows) == wanted and windows.flatten().equal(torch.arange(wanted * 128) % 50)
    assert len(tokenised) == times
