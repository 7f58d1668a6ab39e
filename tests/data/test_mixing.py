"""Several calibration texts in one: shares, rounding, held-out windows, order, and what a text lacks."""

import json
import logging
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rankfold.data.built_in import MIXTURES
from rankfold.data.load import load_calibration
from rankfold.data.mixing import expanded, held_out_of, interleaved, portions, shares_of, spread
from rankfold.errors import DataError, OptionError
from rankfold.models.opening import open_model

LETTERS = {"a": "abcdefgh", "b": "ijklmnop", "c": "qrstuvwx"}


def characters(text: str, return_tensors: str, verbose: bool = True, add_special_tokens: bool = True):
    """A tokenizer with one id a character."""
    return SimpleNamespace(input_ids=torch.tensor([[ord(c) for c in text]], dtype=torch.long))


def source(context: int = 64):
    return SimpleNamespace(
        name="model",
        context_length=context,
        tokenizer=characters,
        config=SimpleNamespace(vocab_size=128),
        part=SimpleNamespace(takes_images=False),
        architecture=SimpleNamespace(decoder=True, needs_start=False),
        image_token=None,
    )


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files of some length each; every text has letters of its own, so that a window tells where it comes from."""
    monkeypatch.chdir(tmp_path)

    def make(**lengths: int) -> list[str]:
        for name, length in lengths.items():
            (tmp_path / f"{name}.txt").write_text("".join(LETTERS[name][i * i * i // 7 % 8] for i in range(length)))
        return [f"{name}.txt" for name in lengths]

    return make


def of_text(windows: torch.Tensor, name: str) -> torch.Tensor:
    """The windows that come from a text."""
    letters = torch.tensor([ord(c) for c in LETTERS[name[0]]])
    return windows[torch.isin(windows, letters).all(1)]


counts = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.integers(n, 300),
        st.lists(st.sampled_from([1, 2, 3, 0.1, 0.25, 7, 100]), min_size=n, max_size=n),
        st.lists(st.one_of(st.just(math.inf), st.integers(1, 60)), min_size=n, max_size=n),
    )
)


@settings(max_examples=300, deadline=None)
@given(counts)
def test_windows_add_up_and_no_text_gives_more_than_it_has(case):
    samples, shares, room = case
    found = portions(samples, shares, room)
    fitted, held_out = (sum(column) for column in zip(*found, strict=True))
    assert all(sum(portion) <= most for portion, most in zip(found, room, strict=True))
    assert all(portion.fitted >= 1 for portion in found)
    if sum(room) >= samples + held_out_of(samples):
        assert (fitted, held_out) == (samples, held_out_of(samples))
    else:
        assert fitted + held_out == sum(room) and held_out >= (1 if sum(room) > len(room) else 0)
    if held_out >= len(room):
        assert all(portion.held_out >= 1 or most == 1 for portion, most in zip(found, room, strict=True))


@settings(max_examples=300, deadline=None)
@given(counts)
def test_without_limits_every_text_gets_its_share_rounded(case):
    samples, shares, _ = case
    whole = sum(Fraction(str(s)) for s in shares)
    for count, share in zip(spread(samples, shares, [math.inf] * len(shares)), shares, strict=True):
        exact = samples * Fraction(str(share)) / whole
        assert abs(count - exact) < len(shares)
        if exact.denominator == 1 and all((samples * Fraction(str(s)) / whole).denominator == 1 for s in shares):
            assert count == exact


@pytest.mark.parametrize(
    ("total", "shares", "room", "expected"),
    [
        (10, [0.7, 0.3], [math.inf] * 2, [7, 3]),
        (32, [0.7, 0.3], [math.inf] * 2, [22, 10]),
        (5, [1, 1], [math.inf] * 2, [3, 2]),
        (128, [1, 1, 1], [math.inf] * 3, [43, 43, 42]),
        (100, [0.99, 0.005, 0.005], [math.inf] * 3, [98, 1, 1]),  # nobody goes away empty
        (2, [8, 1, 1], [math.inf] * 3, [2, 0, 0]),  # where there is too little for all
        (30, [1, 1, 1], [2, math.inf, math.inf], [2, 14, 14]),
        (30, [1, 2, 1], [2, math.inf, math.inf], [2, 19, 9]),  # the others in their proportions
        (4, [1, 1], [0, math.inf], [0, 4]),
        (2**62, [1, 1], [math.inf] * 2, [2**61, 2**61]),
    ],
)
def test_shares_are_rounded(total, shares, room, expected):
    assert spread(total, shares, room) == expected


def test_only_the_proportions_of_shares_count():
    assert shares_of({"a": 7, "b": 3}) == {"a": 0.7, "b": 0.3} == shares_of({"a": 0.7, "b": 0.3})
    assert shares_of(["a", "b", "c", "d"]) == dict.fromkeys("abcd", 0.25)
    assert shares_of("a") == shares_of(["a"]) == shares_of({"a": 0.2}) == {"a": 1.0}
    for total in range(3, 60):  # shares that were rounded to floats divide as the numbers they stand for
        assert spread(total, [*shares_of({"a": 2, "b": 1}).values()], [math.inf] * 2) == spread(
            total, [2, 1], [math.inf] * 2
        )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no calibration text is named; give at least one"),
        (["a", "b", "a"], "calibration text 'a' is named more than once; name it once, with a larger share"),
        ({"a": 0, "b": 1}, "the share of calibration text 'a' must be a number above 0, got 0"),
        ({"a": 1, "b": -1}, "the share of calibration text 'b' must be a number above 0, got -1"),
        ({"a": math.nan}, "must be a number above 0, got nan"),
        ({"a": math.inf}, "must be a number above 0, got inf"),
        ({"a": "0.5"}, "must be a number above 0, got '0.5'"),
        ({"a": True}, "must be a number above 0, got True"),
        (7, "calibration data is the name of a text, a list of texts or of names, name -> share, .*; got int$"),
        ([7], "calibration data is the name of a text, .*; got list of int$"),
        ({7: 1}, "calibration texts are a name, a list of names, or name: share"),
    ],
)
def test_what_is_no_mix_is_refused(texts, message):
    with pytest.raises(OptionError, match=message):
        load_calibration(texts, source())


def test_every_text_gives_its_share_drawn_as_if_it_were_alone(texts):
    a, b = texts(a=4000, b=4000)
    tokens = load_calibration({a: 0.7, b: 0.3}, source(), num_samples=32, max_length=16, seed=3)
    assert tokens.ids.shape == (32, 16) and tokens.held_out.shape == (4, 16)
    for name, fitted, held_out in ((a, 22, 3), (b, 10, 1)):
        alone = load_calibration(name, source(), num_samples=32, max_length=16, seed=3).ids
        assert torch.equal(of_text(tokens.ids, name), alone[:fitted])
        assert torch.equal(of_text(tokens.held_out, name), alone[fitted : fitted + held_out])


def test_windows_of_texts_are_interleaved_by_the_seed(texts):
    names = texts(a=4000, b=4000)
    mixes = [load_calibration(names, source(), num_samples=32, max_length=16, seed=seed).ids for seed in (0, 0, 1)]
    orders = [(ids[:, 0] < ord(LETTERS["b"][0])).tolist() for ids in mixes]
    assert torch.equal(mixes[0], mixes[1]) and orders[0] != orders[2]
    changes = sum(x != y for x, y in zip(orders[0], orders[0][1:], strict=False))
    assert sum(orders[0]) == 16 and changes > 8  # blocked: 1


def test_interleaving_leaves_one_text_as_it_is():
    windows = torch.arange(60).view(12, 5)
    assert torch.equal(interleaved([windows], seed=4), windows)


@pytest.mark.parametrize("wrapped", [lambda name: [name], lambda name: {name: 0.3}], ids=["list", "share"])
def test_a_mix_of_one_text_is_that_text(texts, wrapped):
    (a,) = texts(a=400)
    plain, mixed = (load_calibration(name, source(), num_samples=32, max_length=16, seed=2) for name in (a, wrapped(a)))
    assert torch.equal(plain.ids, mixed.ids) and torch.equal(plain.held_out, mixed.held_out)
    assert plain.describe() == mixed.describe() and "texts" not in plain.describe()


def test_a_mix_describes_every_text(texts):
    a, b = texts(a=4000, b=4000)
    tokens = load_calibration({a: 3, b: 1}, source(), num_samples=16, max_length=16, seed=1)
    described = tokens.describe()
    assert described == json.loads(json.dumps(described))  # identities are compared with what was read back
    assert described["source"] == "a.txt=0.75 + b.txt=0.25"
    assert (described["num_samples"], described["held_out"], described["num_samples_wanted"]) == (16, 2, 16)
    first, second = described["texts"]
    assert first["origin"].startswith("file:") and first["origin"] != second["origin"]
    expected = {"draw": "windows of the whole text", "origin": first["origin"]}
    assert first == {"source": "a.txt", "share": 0.75, "num_samples": 12, "held_out": 1, **expected}
    assert (second["share"], second["num_samples"], second["held_out"]) == (0.25, 4, 1)


def test_what_a_text_lacks_the_others_give(texts, caplog):
    names = texts(a=4000, b=3 * 16 + 1, c=4000)
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration(names, source(), num_samples=32, max_length=16)
    assert tokens.ids.shape == (32, 16) and tokens.held_out.shape == (4, 16)
    counts = [(part["num_samples"], part["held_out"]) for part in tokens.describe()["texts"]]
    assert counts == [(15, 2), (2, 1), (15, 1)]
    assert [r.getMessage() for r in caplog.records] == ["b.txt fills 3 samples, not 12; other texts give the rest"]


def test_where_all_texts_are_short_everything_is_used(texts, caplog):
    names = texts(a=5 * 16, b=3 * 16)
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration(names, source(), num_samples=32, max_length=16)
    assert (len(tokens.ids), len(tokens.held_out)) == (7, 1)
    assert "the texts fill 8 samples of 16 tokens, not 36: 7 fitted, 1 held out" in caplog.text
    assert tokens.describe()["num_samples_wanted"] == 32


def test_texts_of_one_window_each_are_all_fitted(texts):
    tokens = load_calibration(texts(a=40, b=40), source(), num_samples=4, max_length=32)
    assert tokens.ids.shape == (2, 32) and tokens.held_out is None


def test_all_windows_have_the_length_of_the_shortest(texts, caplog):
    a, b, c = texts(a=4000, b=40, c=70)
    with caplog.at_level(logging.INFO, "rankfold"):
        tokens = load_calibration([a, b, c], source(context=128), num_samples=16, max_length=128, seed=5)
    assert tokens.ids.shape == (16, 32) and tokens.held_out.shape == (2, 32)
    assert "samples of all texts have 32 tokens, the length of those of b.txt" in caplog.text
    alone = load_calibration(a, source(), num_samples=32, max_length=32, seed=5).ids
    assert torch.equal(of_text(tokens.ids, a), alone[: len(of_text(tokens.ids, a))])
    assert [part["num_samples"] + part["held_out"] for part in tokens.describe()["texts"]] == [15, 1, 2]


def test_a_text_too_short_for_any_window_is_named(texts):
    with pytest.raises(DataError, match=r"text source 'b.txt' has 20 tokens; at least 32 are needed"):
        load_calibration(texts(a=4000, b=20), source(), num_samples=4, max_length=64)


def test_every_text_needs_a_sample(texts):
    names = texts(a=400, b=400, c=400)
    with pytest.raises(
        OptionError, match="3 calibration texts need at least as many samples, got 2; give more samples"
    ):
        load_calibration(names, source(), num_samples=2, max_length=16)
    assert [
        len(of_text(load_calibration(names, source(), num_samples=3, max_length=16).ids, name)) for name in names
    ] == [1, 1, 1]


def test_one_file_under_two_names_is_refused(texts):
    """What is held out under one name would be fitted under the other."""
    (a,) = texts(a=400)
    with pytest.raises(OptionError, match="calibration text 'a.txt' is named more than once"):
        load_calibration([a, f"./{a}"], source(), num_samples=4, max_length=16)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=128,
        max_position_embeddings=32,
    )
    return open_model(LlamaForCausalLM(config), device="cpu", tokenizer=characters)


def test_text_of_the_model_itself_goes_with_others(llama, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 100)
    tokens = load_calibration(["self", str(tmp_path / "a.txt")], llama, num_samples=8, max_length=12)
    own = tokens.ids[tokens.ids[:, 0] == llama.config.bos_token_id]
    assert torch.equal(own, load_calibration("self", llama, num_samples=4, max_length=12).ids)
    assert [part["source"] for part in tokens.describe()["texts"]] == ["self", "a.txt"]
    assert tokens.describe()["texts"][0]["draw"] == "sampled"


def test_text_of_the_model_itself_is_only_fitted_where_few_samples_are_held_out(llama, texts):
    shares = dict.fromkeys(texts(a=2000, b=2000, c=2000), 0.3) | {"self": 0.1}
    tokens = load_calibration(shares, llama, num_samples=8, max_length=12)
    counts = {part.name: (part.num_samples, part.held_out) for part in tokens.texts}
    assert counts["self"] == (1, 0) and sum(held_out for _, held_out in counts.values()) == len(tokens.held_out) < 4


def test_a_named_mixture_stands_for_its_texts(texts, monkeypatch):
    names = texts(a=2000, b=2000, c=2000)
    mixture = {"of-two": dict(zip(names, (0.25, 0.75), strict=False))}
    for module in ("mixing", "load", "text"):
        monkeypatch.setattr(f"rankfold.data.{module}.MIXTURES", mixture)
    assert expanded({"of-two": 0.8, "c.txt": 0.2}) == {"a.txt": 0.2, "b.txt": pytest.approx(0.6), "c.txt": 0.2}
    for given_as in ("of-two", ["of-two"], {"of-two": 3}):
        mixed = load_calibration(given_as, source(), num_samples=16, max_length=32)
        assert [len(of_text(mixed.ids, name)) for name in names] == [4, 12, 0]
    explicit = load_calibration(mixture["of-two"], source(), num_samples=16, max_length=32)
    assert mixed.describe() == explicit.describe()
    with pytest.raises(OptionError, match=r"'a\.txt' is named more than once"):
        load_calibration(["of-two", "a.txt"], source(), num_samples=16, max_length=32)


def test_shares_of_every_mixture_add_up_to_one():
    for name, shares in MIXTURES.items():
        assert math.isclose(sum(shares.values()), 1) and expanded({name: 1.0}) == shares
