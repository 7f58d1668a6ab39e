"""The pictures and questions of benchmarks/images_and_text.py: every answer is read off the pixels again."""

import importlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"
SCENES = 200


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("pictures")


@pytest.fixture(scope="module")
def picture_model(pictures):
    return importlib.import_module("picture_model")


def seen(pictures, image: np.ndarray) -> list[tuple[str, str, int, int]]:
    """Shape, colour, row and column of everything in a picture, out of its pixels."""
    found = []
    for name, rgb in pictures.COLOURS.items():
        here = (image == rgb).all(-1)
        for row, column in np.ndindex(3, 3):
            cell = here[12 * row : 12 * row + 12, 12 * column : 12 * column + 12]
            if cell.any():
                found.append((shape_of(cell), name, row, column))
    return found


def shape_of(cell: np.ndarray) -> str:
    """By how wide it is, from top to bottom."""
    widths = [int(line.sum()) for line in cell if line.any()]
    if len(set(widths)) == 1:
        return "square"
    if widths[0] < widths[-1]:
        return "triangle"
    return "circle" if len(set(widths)) > 2 else "cross"


def answer_of(pictures, text: str, things: list[tuple[str, str, int, int]]) -> str:
    """To a question, by what is there."""
    words = text.split()
    match words:
        case ["what", "colour", "is", shape]:
            (answer,) = [c for s, c, *_ in things if s == shape]
        case ["what", "shape", "is", colour]:
            (answer,) = [s for s, c, *_ in things if c == colour]
        case ["how", "many", what]:
            count = sum(what in ("things", f"{s}s", f"{s}es") for s, *_ in things)
            answer = ["zero", "one", "two", "three", "four"][count]
        case ["where", "is", colour, shape]:
            ((row, column),) = [at for s, c, *at in things if (s, c) == (shape, colour)]
            word = ("north", "", "south")[row] + ("west", "", "east")[column]
            answer = word or "centre"
        case ["is", "there", colour, shape]:
            answer = "yes" if any((s, c) == (shape, colour) for s, c, *_ in things) else "no"
    return answer


def test_answers_agree_with_the_pixels(pictures):
    draw, kinds = random.Random(5), []
    for seed in range(SCENES):
        things = pictures.scene(draw)
        found = seen(pictures, pictures.drawn(things, seed))
        assert len(found) == len(things)
        for kind, text, answer in pictures.questions(things, draw):
            assert answer_of(pictures, text, found) == answer, (text, found)
            kinds.append(kind)
    assert all(kinds.count(kind) > SCENES / 3 for kind in pictures.KINDS if kind != "text")


def test_answers_agree_with_the_description(pictures):
    draw, asked = random.Random(6), 0
    for _ in range(SCENES):
        things = pictures.scene(draw)
        words = [name.split() for name in pictures.described(things).removesuffix(" .").split(" and ")]
        found = [(shape, colour, 0, 0) for colour, shape in words]
        for kind, text, answer in pictures.text_questions(things, draw):
            assert kind == "text" and answer_of(pictures, text, found) == answer
            asked += 1
    assert asked > SCENES / 2


def test_no_answer_is_worth_guessing(pictures):
    draw = random.Random(7)
    asked = [question for _ in range(SCENES) for question in pictures.questions(pictures.scene(draw), draw)]
    for kind, most in {"colour": 0.3, "shape": 0.4, "count": 0.5, "position": 0.25, "presence": 0.6}.items():
        answers = [question.answer for question in asked if question.kind == kind]
        assert max(map(answers.count, answers)) < most * len(answers), kind


def test_training_and_test_share_no_picture(pictures):
    """The key forgets noise, pixels of place and order, and nothing else; the test gets its due share."""
    draw = random.Random(8)
    scenes = [pictures.scene(draw) for _ in range(2000)]
    for things in scenes[:100]:
        other = tuple(thing._replace(shift=(0, 0)) for thing in reversed(things))
        assert pictures.key_of(other) == pictures.key_of(things)
        moved = (things[0]._replace(cell=next(c for c in range(9) if c not in {t.cell for t in things})), *things[1:])
        assert pictures.key_of(moved) != pictures.key_of(things)
    share = sum(pictures.in_test(pictures.key_of(things)) for things in scenes) / len(scenes)
    assert abs(share - 1 / pictures.TEST_SHARE) < 0.03


def test_every_word_is_in_the_vocabulary(pictures):
    draw = random.Random(9)
    for _ in range(SCENES):
        things = pictures.scene(draw)
        for question in (*pictures.questions(things, draw), *pictures.text_questions(things, draw)):
            words = {*question.text.split(), question.answer, *pictures.described(things).split()}
            assert words <= set(pictures.WORDS)


@pytest.mark.parametrize("with_picture", [True, False])
def test_it_is_asked_as_it_was_trained(with_picture, pictures, picture_model):
    """Tokens and pixels by the processor and its template, against those that training makes by itself."""
    draw = random.Random(10)
    things = pictures.scene(draw)
    image, before = (pictures.drawn(things, 0), None) if with_picture else (None, pictures.described(things))
    asked = (pictures.questions if with_picture else pictures.text_questions)(things, draw)
    turns = []
    for number, question in enumerate(asked):
        shown = [{"type": "image", "image": Image.fromarray(image)}] if with_picture and not number else []
        text = f"{before} {question.text}" if before and not number else question.text
        turns.append({"role": "user", "content": [*shown, {"type": "text", "text": text}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": question.answer}]})
    made = picture_model.processor().apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    ids, learnt = picture_model.ids_of(asked, before)
    assert made["input_ids"].tolist() == [ids] and len(learnt) == len(ids)
    answers = [word for question in asked for word in (picture_model.VOCABULARY[question.answer], picture_model.END)]
    assert [token for token, wanted in zip(ids, learnt, strict=True) if wanted] == answers
    if with_picture:
        torch.testing.assert_close(made["pixel_values"], picture_model.pixels_of(image[None]))
