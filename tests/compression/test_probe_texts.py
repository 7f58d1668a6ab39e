"""Probe texts: what is read, what is measured of them against the whole models, and what is said."""

import json
import logging
import math
import re

import pytest
import torch
import transformers as t

import rankfold
from families import CONFIGS, opened, tokens
from interrupted import assert_ends_in_the_same_bytes
from rankfold import MoDeGPT
from rankfold.compression import probe_texts as probing
from rankfold.data import probes
from rankfold.data.probes import KINDS, LENGTH, PLAIN, TEMPLATE, Probes, load_probes, one_of_each, passages_of
from rankfold.report.model_card import model_card
from rankfold.report.record import read_record
from saved import save_text, save_tiny
from tiny_encoders import opened_encoder

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ strftime_now('%d') }}{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def every_passage():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "passages_of", passages_of)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probing")
    save_tiny(folder / "model")
    save_text(folder / "text.txt")
    return folder


@pytest.fixture
def source(place):
    return rankfold.open_model(place / "model", device="cpu")


@pytest.fixture
def calibration(place, source):
    return rankfold.load_calibration(str(place / "text.txt"), source, num_samples=8, max_length=64)


def record_of(folder) -> dict:
    return json.loads((folder / "rankfold.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_several_passages_of_its_own(kind):
    passages = passages_of(kind)
    assert len(passages) >= 6 and len({str(passage) for passage in passages}) == len(passages)
    for passage in passages:
        text = passage if isinstance(passage, str) else " ".join(turn["content"] for turn in passage)
        assert len(text) >= (120 if kind == "other languages" else 200) and "%%" not in text
        if kind == "dialogue":
            assert [turn["role"] for turn in passage] == ["user", "assistant"] * (len(passage) // 2)


def test_passages_are_cut_to_a_length_and_padded_after_their_end(source):
    found = load_probes(source)
    assert found.ids.shape == (len(found.lengths), max(found.lengths)) and max(found.lengths) <= LENGTH
    assert found.kinds == tuple(kind for kind in KINDS for _ in passages_of(kind)) and found.dialogue == PLAIN
    for row, length, kind in zip(found.ids, found.lengths, found.kinds, strict=True):
        assert len(set(row[length - 1 :].tolist())) == 1
        text = source.tokenizer.decode(row[:length])
        assert kind == "dialogue" or any(passage.startswith(text[:-1]) for passage in passages_of(kind))


def test_of_each_kind_the_longest_passage_is_cut_to_the_shortest_of_these(source):
    found = load_probes(source)
    of_kind = {kind: [i for i, other in enumerate(found.kinds) if other == kind] for kind in KINDS}
    longest = [max(rows, key=lambda i: found.lengths[i]) for rows in of_kind.values()]
    length = min(found.lengths[i] for i in longest)
    assert torch.equal(one_of_each(found), torch.stack([found.ids[i, :length] for i in longest]))
    few = Probes(torch.arange(12).view(3, 4), (2, 4, 3), ("prose", "prose", "web text"), PLAIN)
    assert one_of_each(few).tolist() == [[4, 5, 6], [8, 9, 10]]


def test_a_context_shorter_than_a_passage_cuts_it(tmp_path):
    folder = save_tiny(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    source = rankfold.open_model(folder, device="cpu")
    found = load_probes(source)
    assert found.ids.shape[1] == 16
    passages = [passage for kind in KINDS for passage in passages_of(kind)]
    for row, kind, passage in zip(found.ids, found.kinds, passages, strict=True):
        shown = source.tokenizer.decode(row).strip().rstrip("\ufffd")  # half a character
        assert kind == "dialogue" or passage.startswith(shown)
        assert kind != "dialogue" or passage[-1]["content"].endswith(shown)  # the end of a dialogue


def test_dialogues_are_in_the_models_own_format_on_every_day(source):
    source.tokenizer.chat_template = CHAT
    found = load_probes(source)
    assert found.dialogue == TEMPLATE
    rows = [i for i, kind in enumerate(found.kinds) if kind == "dialogue"]
    last = source.tokenizer.decode(found.ids[rows[-1], : found.lengths[rows[-1]]])
    assert last.endswith("</s>") and (passages_of("dialogue")[-1][-1]["content"] + "</s>").endswith(last)
    short = [{"role": "user", "content": "Hi"}]
    assert probes._templated(source.tokenizer, short, "m") == f"<user>{probes.DATE}Hi</s>"


def test_a_template_that_takes_lists_of_contents_is_given_these(source):
    source.tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor "
        "%}{% endfor %}"
    )
    assert load_probes(source).dialogue == TEMPLATE
    source.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    assert load_probes(source).dialogue == PLAIN


def test_a_chat_template_that_fails_is_named_and_turns_are_plain(source, caplog):
    source.tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with caplog.at_level(logging.INFO):
        assert load_probes(source).dialogue == PLAIN
    assert "chat template" in caplog.text and "no system message" in caplog.text


def test_a_start_token_stands_in_front_once(tmp_path):
    """Gemma is lost without it, and its template writes it too."""
    config = CONFIGS["gemma"]()
    config.vocab_size = 400
    tokenizer = rankfold.open_model(save_tiny(tmp_path / "model"), device="cpu").tokenizer
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    source = rankfold.open_model(t.GemmaForCausalLM(config), tokenizer=tokenizer, device="cpu")
    found = load_probes(source)
    start = tokenizer.bos_token_id
    assert (found.ids[:, 0] == start).all()
    whole = [row for row, kind in zip(found.ids, found.kinds, strict=True) if kind != "dialogue"]
    assert not any((row[1:] == start).any() for row in whole)


@torch.no_grad()
def nats(model, found) -> dict[str, float]:
    """Per token, one passage at a time and nothing after it."""
    sums = {kind: torch.zeros(2, dtype=torch.float64) for kind in KINDS}
    for row, length, kind in zip(found.ids, found.lengths, found.kinds, strict=True):
        ids = row[None, :length]
        sums[kind] += torch.tensor([model(ids, labels=ids).loss.item() * (length - 1), length - 1])
    return {kind: (total / count).item() for kind, (total, count) in sums.items()}


@pytest.mark.parametrize("way", ["sequential", "one-pass", "moments"])
def test_likelihoods_are_those_of_the_whole_models(way, source, calibration, tmp_path):
    moments = rankfold.calibrate(source, calibration, tmp_path / "moments") if way == "moments" else None
    given = {"moments": moments} if moments else {"calibration": calibration, "mode": way}
    folder = rankfold.compress(source, method=METHOD, output=tmp_path / "out", **given).output
    found = record_of(folder)["probe_texts"]
    loaded = load_probes(source)
    dense = nats(source.whole_model().float(), loaded)
    small = nats(rankfold.load(folder, device="cpu").float(), loaded)
    for kind, facts in found["kinds"].items():
        assert facts["perplexity_dense"] == pytest.approx(math.exp(dense[kind]), rel=2e-3)
        assert facts["perplexity"] == pytest.approx(math.exp(small[kind]), rel=2e-3)
        assert facts["ratio"] == pytest.approx(math.exp(small[kind] - dense[kind]), rel=2e-3)
        mine = [length - 1 for length, other in zip(loaded.lengths, loaded.kinds, strict=True) if other == kind]
        assert (facts["passages"], facts["tokens"]) == (len(mine), sum(mine)) and facts["standard_error"] > 0
    assert list(found["kinds"]) == list(KINDS)


def with_losses(monkeypatch, lost: dict[str, float], dense: float = 1.0) -> None:
    """The compressed model loses so many nats a token of these kinds."""
    plain = probing.ProbeTexts._losses

    def losses(self, stream):
        generator = torch.Generator().manual_seed(0)
        added = lost if stream is self.small else {}
        return [
            dense + added.get(kind, 0.0) + 0.01 * torch.randn(len(row), generator=generator)
            for row, kind in zip(plain(self, stream), self.probes.kinds, strict=True)
        ]

    monkeypatch.setattr(probing.ProbeTexts, "_losses", losses)


def test_a_kind_that_is_damaged_is_named_everywhere_with_what_to_do(source, calibration, tmp_path, monkeypatch, caplog):
    with_losses(monkeypatch, {"source code": 1.7, "web text": 0.5})
    with caplog.at_level(logging.WARNING):
        folder = rankfold.compress(source, method=METHOD, calibration=calibration, output=tmp_path / "out").output
    record = record_of(folder)
    warning = record["probe_texts"]["warning"]
    assert re.search(
        r"SKILLS ARE LOST: source code x 5\.5 .*\(x 2\.9\); add some to .* 0\.3 of source code, or lower",
        warning,
    )
    assert "web text" not in warning and warning in caplog.text and warning in (folder / "README.md").read_text()
    damaged = [kind for kind, facts in record["probe_texts"]["kinds"].items() if facts["is_damaged"]]
    assert damaged == ["source code"]
    assert rankfold.load(folder, device="cpu").config.quantization_config.fields["probe_texts"]["warning"] == warning


def test_where_all_kinds_are_damaged_other_text_is_no_help(source, calibration, tmp_path, monkeypatch):
    with_losses(monkeypatch, dict.fromkeys(KINDS, 1.7))
    folder = rankfold.compress(source, method=METHOD, calibration=calibration, output=tmp_path / "out").output
    assert record_of(folder)["probe_texts"]["warning"].endswith("lower the sparsity")


def test_what_the_dense_model_guesses_cannot_be_lost(source, calibration, tmp_path, monkeypatch):
    with_losses(monkeypatch, {"source code": 1.7}, dense=math.log(400))
    folder = rankfold.compress(source, method=METHOD, calibration=calibration, output=tmp_path / "out").output
    found = record_of(folder)["probe_texts"]
    assert found["warning"] is None and not any(facts["is_known"] for facts in found["kinds"].values())


def test_a_model_without_a_tokenizer_has_no_probe_texts_and_the_record_says_why(tmp_path):
    folder = rankfold.compress(opened("llama"), method=METHOD, calibration=tokens(), output=tmp_path / "out").output
    assert "without a tokenizer" in record_of(folder)["probe_texts"]["skipped"]


def test_a_tokenizer_of_another_model_is_named(place, tmp_path):
    tokenizer = rankfold.open_model(place / "model", device="cpu").tokenizer
    source = rankfold.open_model(opened("llama").model, tokenizer=tokenizer, device="cpu")
    folder = rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / "out").output
    assert "the model has 96 embeddings" in record_of(folder)["probe_texts"]["skipped"]


def test_of_encoders_nothing_is_said():
    assert probing.follow_probe_texts(opened_encoder("bert")).finish(0.3) is None


def test_an_interrupted_run_measures_the_same(source, calibration, tmp_path, monkeypatch):
    assert_ends_in_the_same_bytes(
        lambda folder: rankfold.compress(source, method=METHOD, calibration=calibration, output=folder).output,
        tmp_path,
        monkeypatch,
    )
    whole, parts = (record_of(tmp_path / name)["probe_texts"] for name in ("whole", "parts"))
    assert whole == parts and "kinds" in whole


def test_records_of_before_have_no_probe_texts(source, calibration, tmp_path):
    folder = rankfold.compress(source, method=METHOD, calibration=calibration, output=tmp_path / "out").output
    record = record_of(folder)
    assert "probe texts" in model_card(record, "out")
    del record["probe_texts"], record["held_out"]["standard_error"], record["held_out"]["dense_warning"]
    del record["plan"]["budget"]["excess"]
    (folder / "rankfold.json").write_text(json.dumps(record))
    assert "probe texts" not in model_card(read_record(folder), "out")


def test_a_tokenizer_that_makes_one_token_of_a_text_measures_nothing_and_says_why(source, monkeypatch):
    """As word tokenizers do that split nothing."""
    monkeypatch.setattr(probes, "tokenised", lambda *args, **kwargs: torch.tensor([3]))
    found = probing.follow_probe_texts(source).finish(0.3)
    assert "makes a single token of a probe text" in found["skipped"]
