"""Predictions of the dense model on disk: the same loss as with the model in memory, whatever interrupts."""

import pytest
import torch

import rankfold
from families import some_ids, tiny_model
from rankfold.models.dense_model import DenseModel
from rankfold.recovery import cached as module
from rankfold.recovery.cached import CachedStates
from rankfold.recovery.loss import Head, hidden_states, training_loss

IDS, SCORED = some_ids(6, 24), {"held out: a/b": some_ids(3, 24, seed=2), "probe texts": some_ids(2, 24, seed=3)}


@pytest.fixture(autouse=True)
def few_and_exact(monkeypatch):
    """Compute three sequences at once in fp32, and keep three in a file."""
    monkeypatch.setattr(module, "AT_ONCE", 72)
    monkeypatch.setattr(module, "IN_FILE", 72)
    monkeypatch.setattr("rankfold.recovery.training.trains_in_bf16", lambda device: False)


@pytest.fixture
def saved(tmp_path):
    """Return a function that writes a tiny model and opens it, its blocks on disk."""

    def save(family: str, seed: int = 0) -> DenseModel:
        place = tmp_path / f"{family}-{seed}"
        if not place.exists():
            tiny_model(family, seed).save_pretrained(place)
        return rankfold.open_model(place, device="cpu")

    return save


# A cap, a scale and a divisor of logits, a projection before the head, a tied head with none of these.
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "opt"])
def test_the_loss_is_that_with_the_dense_model_in_memory(saved, tmp_path, family):
    source, student = saved(family), tiny_model(family, seed=1)
    cache = CachedStates(tmp_path / "cache", source, IDS, SCORED, {"teacher": source.fingerprint})
    dense = source.whole_model()
    whole, head, mine = Head(dense), Head(source.model), Head(student)
    assert len(cache) == 6 and next(source.blocks.parameters()).is_meta
    for rows in ([0, 1, 2], [3, 4, 5]):
        ids, kept = (torch.stack([cache[row][key] for row in rows]) for key in ("input_ids", "dense"))
        with torch.no_grad():
            states = hidden_states(dense, whole.decoder, ids)
        assert torch.equal(ids, IDS[rows]) and torch.equal(kept, states)
        compressed = hidden_states(student, mine.decoder, ids)
        beside = training_loss(mine, compressed, ids, loss="kl", teacher=whole, dense=states)
        assert torch.equal(training_loss(mine, compressed, ids, loss="kl", teacher=head, dense=kept), beside)
    for name, ids in SCORED.items():
        losses = torch.stack(cache.losses[name]).mean()
        assert losses.item() == pytest.approx(dense(ids, labels=ids).loss.item(), rel=1e-5), name


def test_a_killed_cache_goes_on_and_a_whole_one_needs_no_dense_model(saved, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*args):
        raise Killed

    def make():
        return CachedStates(tmp_path / "cache", source, IDS, SCORED, {"teacher": source.fingerprint})

    source, states, computed = saved("llama"), module._states, []

    def counted(dense, head, ids):
        if len(computed) == 1:
            computed.append(ids)
            raise Killed
        computed.append(ids)
        return states(dense, head, ids)

    monkeypatch.setattr(module, "_states", counted)
    with pytest.raises(Killed):
        make()
    make()
    assert [ids.tolist() for ids in computed] == [IDS[:3].tolist(), IDS[3:].tolist(), IDS[3:].tolist()]
    monkeypatch.setattr(DenseModel, "whole_model", kill)
    assert make()[4]["dense"].shape == (24, source.config.hidden_size)


def test_damaged_files_are_one_line(saved, tmp_path):
    def make():
        return CachedStates(tmp_path / "cache", source, IDS, SCORED, {"teacher": source.fingerprint})

    source = saved("llama")
    make()
    for name, read in (("states-00000", lambda cache: cache[0]), ("losses", lambda cache: cache.losses)):
        path = tmp_path / "cache" / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(rankfold.RankfoldError, match=rf"{path.name} is damaged .*; remove .*{path.name} and"):
            read(make())


def test_what_belongs_to_others_is_refused(saved, tmp_path):
    def make(folder="cache", seed=0, **identity):
        source = saved("llama", seed)
        return CachedStates(tmp_path / folder, source, IDS, SCORED, {"teacher": source.fingerprint, **identity})

    make(texts={"a": {"sha256": "1"}})
    with pytest.raises(rankfold.RankfoldError, match=r"of another model or on other texts \(its teacher is"):
        make(texts={"a": {"sha256": "1"}}, seed=1)
    with pytest.raises(rankfold.RankfoldError, match=r"\(its texts.a.sha256 is 1, not 2\); choose a new folder"):
        make(texts={"a": {"sha256": "2"}})
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "cache.json.tmp").touch()
    make("killed")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(rankfold.RankfoldError, match="full holds something else"):
        make("full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
