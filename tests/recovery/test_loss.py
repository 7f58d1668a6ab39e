"""Losses of chunks of positions against the same of whole logits."""

import pytest
import torch
from torch.nn import functional

from families import some_ids, tiny_model
from rankfold.recovery.loss import Head, hidden_states, kl_divergence, training_loss

# Caps, scales and divisors of logits, biases, another way to the decoder.
FAMILIES = ("llama", "gemma2", "cohere", "granite", "opt", "gpt2", "phi", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_makes_the_logits_that_the_model_makes(family):
    model, ids = tiny_model(family), some_ids()
    head = Head(model)
    hidden = hidden_states(model, head.decoder, ids)
    torch.testing.assert_close(head(hidden), model(ids).logits)
    torch.testing.assert_close(head(hidden[:, 3:5]), model(ids).logits[:, 3:5])


@pytest.mark.parametrize("logits_at_once", [1, 20, 1000])
def test_the_divergence_and_its_gradient_are_those_of_the_distributions(logits_at_once, monkeypatch):
    monkeypatch.setattr("rankfold.recovery.loss.IN_CACHE", logits_at_once)
    dense, compressed, weights = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 5, 7), (2, 5, 7), (2, 5)))
    found, wanted = compressed.clone().requires_grad_(), compressed.requires_grad_()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=dense), torch.distributions.Categorical(logits=wanted)
    )
    divergence = kl_divergence(dense, found)
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-5, atol=1e-6)
    (divergence * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    assert not kl_divergence(dense, dense).any()


@pytest.mark.parametrize("loss", ["kl", "next-token", "both"])
def test_the_loss_of_chunks_and_its_gradient_are_those_of_whole_logits(loss, monkeypatch):
    monkeypatch.setattr("rankfold.recovery.loss.POSITIONS", 5)
    torch.manual_seed(0)
    dense, student, ids = tiny_model("gemma2"), tiny_model("gemma2", seed=1), some_ids()
    student.get_output_embeddings().requires_grad_(False)  # as in every training
    heads = Head(student), Head(dense)
    states = [hidden_states(model, head.decoder, ids) for model, head in zip((student, dense), heads, strict=True)]
    found = training_loss(heads[0], states[0], ids, loss=loss, teacher=heads[1], dense=states[1].detach())
    found.backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()

    logits, wanted = student(ids).logits[:, :-1], dense(ids).logits[:, :-1].detach()
    cross_entropy = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    p = wanted.softmax(-1)
    divergence = (p * (p.log() - logits.log_softmax(-1))).sum(-1).mean()
    expected = {"kl": divergence, "next-token": cross_entropy, "both": divergence + cross_entropy}[loss]
    torch.testing.assert_close(found, expected)
    expected.backward()
    assert len(gradients) > 10
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients.get(name), parameter.grad, msg=name)


def test_a_model_is_as_it_was_after_its_head_was_called():
    model, ids = tiny_model("llama"), some_ids()
    before = model(ids).logits
    Head(model)(torch.zeros(1, 2, model.config.hidden_size))
    assert "forward" not in vars(model.get_decoder())
    assert torch.equal(model(ids).logits, before)
