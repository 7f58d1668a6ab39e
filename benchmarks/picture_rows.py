"""The questions of pictures.py as rows of ScienceQA, for benchmarks/science_qa.py.

Kinds of question stand for subjects: ScienceQA's social science is mostly maps, its language science mostly text.
Questions of the kind ``text`` have a description as their context; those of the kind ``word`` have neither.
"""

import random

import numpy as np

import pictures

GROUPS = {
    **{"colour": tuple(pictures.COLOURS), "shape": pictures.SHAPES, "direction": pictures.PLACES},
    **{"number": pictures.NUMBERS, "reply": ("yes", "no")},
}
SUBJECTS = {
    **dict.fromkeys(("colour", "shape", "count"), "natural science"),
    **dict.fromkeys(("position", "presence"), "social science"),
    **dict.fromkeys(("text", "word"), "language science"),
}
MOST = 5  # choices of a question


def rows(draw: random.Random, test: bool) -> list[tuple[dict, np.ndarray | None]]:
    """Return rows about one scene, each with its picture or none: those that are of the test, or those of training."""
    found = []
    while not found:
        things = pictures.scene(draw)
        text, word = pictures.described(things), _row(_word_question(draw), draw)
        if pictures.in_test(pictures.key_of(things)) == test:
            image = pictures.drawn(things, draw.getrandbits(32))
            found += [(_row(question, draw), image) for question in pictures.questions(things, draw)]
        if pictures.in_test(text) == test:
            found += [(_row(question, draw, text), None) for question in pictures.text_questions(things, draw)[:1]]
        if pictures.in_test(" ".join(sorted(word["choices"]))) == test:
            found.append((word, None))
    return found


def rows_of_all_kinds(draw: random.Random, test: bool, each: int) -> list[tuple[dict, np.ndarray | None]]:
    """Return so many rows of each kind, one of each kind in turn."""
    found = {kind: [] for kind in SUBJECTS}
    while any(len(some) < each for some in found.values()):
        for row, image in rows(draw, test):
            found[row["kind"]].append((row, image))
    return [row for turn in zip(*(some[:each] for some in found.values()), strict=True) for row in turn]


def _word_question(draw: random.Random) -> pictures.Question:
    name = draw.choice([name for name in GROUPS if name != "reply"])
    return pictures.Question("word", f"which word is a {name}", draw.choice(GROUPS[name]))


def _row(question: pictures.Question, draw: random.Random, hint: str = "") -> dict:
    """Return a question with choices in random order, and a grade of three times the number of wrong ones.

    Wrong choices are of the answer's own group of words, for the kind ``word`` of all other groups.
    """
    mine = next(group for group in GROUPS.values() if question.answer in group)
    others = [word for group in GROUPS.values() for word in group if (group is mine) != (question.kind == "word")]
    wrong = [word for word in others if word != question.answer]
    choices = [question.answer, *draw.sample(wrong, draw.randint(1, min(MOST - 1, len(wrong))))]
    draw.shuffle(choices)
    return {
        **{"question": f"{question.text.capitalize()}?", "choices": choices, "answer": choices.index(question.answer)},
        **{"hint": hint, "subject": SUBJECTS[question.kind], "grade": f"grade{3 * len(choices) - 3}"},
        "kind": question.kind,
    }
