"""What a model writes: the measures by hand, prompts with their answers, and greedy text against a loop of forwards."""

import pytest
import torch
from transformers import GenerationConfig

from rankfold.checkpoint.load import load_model, load_tokenizer
from rankfold.data.probes import passages_of
from rankfold.errors import DataError, OptionError
from rankfold.evaluation import writing
from rankfold.evaluation.evaluate import evaluate
from rankfold.evaluation.generation import generate_ids
from rankfold.evaluation.writing import (
    Prompt,
    Writing,
    arithmetic,
    compared,
    copying,
    distinct,
    equal_share,
    first_difference,
    leading_line,
    leading_number,
    leading_word,
    repetition,
)
from saved import save_tiny


def test_measures_by_hand():
    assert repetition([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)  # 12 21 12 21 12
    assert repetition([1, 2, 3, 4], 4) == 0 and repetition([1, 2, 3], 4) is None
    assert distinct([[1, 2, 3], [1, 2, 4]], 2) == pytest.approx(3 / 4)  # 12 23 12 24; none across texts
    assert distinct([[1]], 2) is None
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2 and first_difference([1, 2], [1, 2, 3]) == 2
    assert equal_share([1, 9, 3], [1, 2, 3, 4]) == 2 / 4 and equal_share([], []) == 1
    facts = compared([[1, 1, 1, 1, 1], [1, 2, 3, 4, 5]], [[1, 1, 2, 2, 2], [1, 2, 3, 4, 5]])
    assert facts["repetition"] == pytest.approx((1 / 2 + 0) / 2) and facts["distinct"] == pytest.approx(5 / 8)
    assert facts["equal"] == pytest.approx((2 / 5 + 1) / 2) and facts["first_difference"] == (2 + 5) / 2
    assert "equal" not in compared([[1, 2]])


def test_what_is_read_of_a_continuation():
    assert leading_word(' "don\'t," he said') == "don't" and leading_word("...") == ""
    assert leading_line("\n stone river \nText: lamp") == "stone river"
    assert leading_number(" 42\n7 + 1 = 8") == "42" and leading_number(" -3.") == "-3" and leading_number("none") == ""


def test_prompts_ask_for_their_answers_and_stay_the_same():
    for prompt in arithmetic(20):
        *shown, asked = prompt.text.split("\n")
        problem = asked.removesuffix(" =")
        assert str(eval(problem)) == prompt.answer and len(shown) == 4
        assert all(eval(line.replace("=", "==")) for line in shown)
    numbers = [int(part) for prompt in arithmetic(200) for part in prompt.text.split("\n")[-1].split()[:3:2]]
    assert min(numbers) == 2 and max(numbers) == 49 and len(set(numbers)) == 48
    for prompt in copying(20):
        asked = prompt.text.split("\n\n")[-1]
        assert asked == f"Text: {prompt.answer}\nCopy:" and prompt.text.count("Text: ") == 4
    assert copying(3) == copying(20)[:3] and arithmetic(3) == arithmetic(20)[:3]
    assert len({prompt.answer for prompt in copying(20)}) == 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("writing") / "model", blocks=2)


@pytest.fixture(scope="module")
def tiny(folder):
    return load_model(folder, device="cpu"), load_tokenizer(folder)


@torch.no_grad()
def greedy(network, ids: list[int], steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        found.append(network(torch.tensor([ids + found])).logits[0, -1].argmax().item())
    return found


def test_prompts_of_several_lengths_are_written_as_one_by_one(tiny):
    prompts = [[5, 6, 7], [8, 9], [7, 6, 5], [40, 41, 42], [3]]
    found = writing.written(*tiny, prompts, 12, 2, "trying")
    assert found == [greedy(tiny[0], prompt, 12) for prompt in prompts]
    assert len({tuple(row) for row in found}) > 1
    ended = found[0][4]
    tiny[0].generation_config.eos_token_id, before = [ended, 399], tiny[0].generation_config.eos_token_id
    try:
        assert writing.written(*tiny, prompts[:1], 12, 2, "trying") == [found[0][: found[0].index(ended)]]
    finally:
        tiny[0].generation_config.eos_token_id = before


def test_a_penalty_in_the_settings_hides_no_repetition(tiny, monkeypatch):
    network, _ = tiny
    expected = greedy(network, [5, 6, 7], 12)
    own = GenerationConfig.from_dict(network.generation_config.to_dict() | {"repetition_penalty": 5.0})
    monkeypatch.setattr(network, "generation_config", own)
    ids = torch.tensor([[5, 6, 7]])
    assert generate_ids(*tiny, ids, max_new_tokens=12).tolist() != [expected]  # it changes what users get
    assert writing.written(*tiny, [[5, 6, 7]], 12, 1, "trying") == [expected]
    assert network.generation_config is own


def test_an_answer_counts_where_the_model_writes_it(tiny, monkeypatch):
    network, tokenizer = tiny
    ids = tokenizer("a class of").input_ids
    said = tokenizer.decode(greedy(network, ids, 8))
    right = Prompt("a class of", said.strip(), str.strip)
    wrong = Prompt("a class of", "something else", str.strip)
    count = len(tokenizer(f" {right.answer}").input_ids)
    monkeypatch.setattr(Writing, "prompts", lambda self: {"all": [right], "half": [right, wrong], "none": [wrong] * 3})
    exact = Writing().measure(network, tokenizer)["exact"]
    longer = tokenizer.decode(greedy(network, ids, count + 2)).strip()
    assert exact["all"] == {"share": float(longer == right.answer), "stderr": None, "prompts": 1}
    loose = [Prompt(p.text, p.answer, lambda text: text.strip()[: len(said.strip())]) for p in (right, wrong)]
    monkeypatch.setattr(Writing, "prompts", lambda self: {"half": loose})
    assert Writing().measure(network, tokenizer)["exact"]["half"] == {"share": 0.5, "stderr": 0.5, "prompts": 2}


def test_the_dense_model_beside_itself_is_the_same_and_another_is_not(folder, tiny, tmp_path):
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a class and a list"}\n' * 3)
    found = evaluate(folder, writing=Writing(str(tmp_path), 2, baseline=str(folder)), device="cpu")["generation"]
    assert found["equal"] == 1 and found["first_difference"] == found["written"] == writing.WRITTEN
    assert found["exact"]["last word"]["prompts"] == 2 and set(found["exact"]) == {"last word", "copying", "arithmetic"}
    texts = Writing(limit=2).free_text(*tiny)
    beginnings = [tiny[1](passage).input_ids[: writing.BEGINNING] for passage in passages_of("prose")[:2]]
    assert texts == [greedy(tiny[0], ids, writing.WRITTEN) for ids in beginnings]
    other = save_tiny(tmp_path / "other", blocks=1)
    small = Writing(limit=2).measure(load_model(other, device="cpu"), tiny[1], texts)
    assert small["equal"] < 1 and small["first_difference"] < writing.WRITTEN


def test_a_baseline_with_other_tokens_is_refused(folder, tmp_path):
    save_tiny(tmp_path / "other")
    tokenizer = load_tokenizer(tmp_path / "other")
    tokenizer.add_tokens(["unheard of"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(OptionError, match=r"baseline='.*other' has another vocabulary, so tokens cannot be compared"):
        evaluate(folder, writing=Writing(limit=1, baseline=str(tmp_path / "other")), device="cpu")


def test_out_of_range(tmp_path):
    with pytest.raises(OptionError, match="limit must be >= 1, got 0"):
        Writing(limit=0).prompts()
    (tmp_path / "lambada.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match="the text needs two words"):
        Writing(str(tmp_path)).prompts()
    with pytest.raises(DataError, match="include_path .*gone is not a folder; give one that holds lambada.jsonl"):
        Writing(str(tmp_path / "gone")).prompts()
    with pytest.raises(OptionError, match="nothing to evaluate; give text, tasks, generation or speed"):
        evaluate("model")
