"""Pictures of a few coloured shapes, and questions about them, for benchmarks/images_and_text.py.

Everything follows from a seed. A scene is asked about in training or in the test, never in both: its key decides,
the shapes and colours and the cells they lie in. Those of the kind ``text`` have a description in place of a picture.

Shape legend: H = W = SIZE pixels.
"""

import random
import zlib
from typing import NamedTuple

import numpy as np

SIZE, CELLS, ACROSS = 36, 3, 9  # pixels of a side, cells on it, pixels across a shape
SHAPES = ("circle", "square", "triangle", "cross")
PLURALS = ("circles", "squares", "triangles", "crosses")
COLOURS = {
    "red": (225, 45, 45),
    "green": (40, 185, 60),
    "blue": (55, 85, 235),
    "yellow": (235, 220, 50),
    "purple": (170, 60, 200),
    "white": (240, 240, 240),
}
PLACES = ("northwest", "north", "northeast", "west", "centre", "east", "southwest", "south", "southeast")
NUMBERS = ("zero", "one", "two", "three", "four")
KINDS = ("colour", "shape", "count", "position", "presence", "text")
TEST_SHARE = 8  # one key in so many is of the test
GLUE = "and . what colour shape is how many things where there yes no"
WORDS = tuple(dict.fromkeys((*GLUE.split(), *SHAPES, *PLURALS, *COLOURS, *PLACES, *NUMBERS)))


class Thing(NamedTuple):
    shape: str
    colour: str
    cell: int  # 0 to 8, row by row
    shift: tuple[int, int]  # pixels down and right of the cell's corner


class Question(NamedTuple):
    kind: str
    text: str
    answer: str  # one word


def scene(draw: random.Random) -> tuple[Thing, ...]:
    """One to four things that all differ, half the time of only two shapes, so that there is something to count."""
    shapes = draw.choice((SHAPES, draw.sample(SHAPES, 2)))
    looks = [(shape, colour) for shape in shapes for colour in COLOURS]
    chosen = draw.sample(looks, draw.randint(1, 4))
    cells, free = draw.sample(range(CELLS**2), len(chosen)), SIZE // CELLS - ACROSS
    shifts = [(draw.randint(0, free), draw.randint(0, free)) for _ in chosen]
    return tuple(Thing(*look, cell, shift) for look, cell, shift in zip(chosen, cells, shifts, strict=True))


def drawn(things: tuple[Thing, ...], seed: int) -> np.ndarray:
    """``(H, W, 3)`` uint8: the things on a dark ground with noise."""
    noise = np.random.default_rng(seed)
    pixels = noise.integers(0, 50) + noise.integers(0, 20, (SIZE, SIZE, 3))
    for thing in things:
        row, column = divmod(thing.cell, CELLS)
        top, left = row * (SIZE // CELLS) + thing.shift[0], column * (SIZE // CELLS) + thing.shift[1]
        pixels[top : top + ACROSS, left : left + ACROSS][MASKS[thing.shape]] = COLOURS[thing.colour]
    return pixels.astype(np.uint8)


def _masks() -> dict[str, np.ndarray]:
    """Shape -> ``(ACROSS, ACROSS)`` where it is."""
    y, x = np.mgrid[-(ACROSS // 2) : ACROSS // 2 + 1, -(ACROSS // 2) : ACROSS // 2 + 1]
    return {
        "circle": x**2 + y**2 <= 18,
        "square": (abs(x) <= 3) & (abs(y) <= 3),
        "triangle": 2 * abs(x) <= y + 4,
        "cross": (abs(x) <= 1) | (abs(y) <= 1),
    }


MASKS = _masks()


def labels(things: tuple[Thing, ...]) -> list[tuple[str, str, str]]:
    """Of every cell the words for shape and colour of what lies there, `no` for nothing, and for the place."""
    there = {thing.cell: (thing.shape, thing.colour) for thing in things}
    return [(*there.get(cell, ("no", "no")), place) for cell, place in enumerate(PLACES)]


def described(things: tuple[Thing, ...]) -> str:
    return " and ".join(f"{thing.colour} {thing.shape}" for thing in things) + " ."


def in_test(key: str) -> bool:
    return zlib.crc32(key.encode()) % TEST_SHARE == 0


def key_of(things: tuple[Thing, ...]) -> str:
    """The same for pictures that differ only in noise and in a few pixels of place."""
    return " ".join(sorted(f"{thing.colour} {thing.shape} {thing.cell}" for thing in things))


def questions(things: tuple[Thing, ...], draw: random.Random) -> list[Question]:
    """One of each kind that can be asked about this picture, in random order."""
    makers = (_colour, _shape, _count, _position, _presence)
    found = [question for make in makers if (question := make(things, draw)) is not None]
    draw.shuffle(found)
    return found


def text_questions(things: tuple[Thing, ...], draw: random.Random) -> list[Question]:
    """About colours and shapes that a text names; without the text itself, which goes before the first of them."""
    found = [question for make in (_colour, _shape) if (question := make(things, draw)) is not None]
    draw.shuffle(found)
    return [question._replace(kind="text") for question in found]


def _alone(things: tuple[Thing, ...], by: str) -> list[Thing]:
    """Things whose shape, or colour, no other one has."""
    values = [getattr(thing, by) for thing in things]
    return [thing for thing, value in zip(things, values, strict=True) if values.count(value) == 1]


def _colour(things, draw) -> Question | None:
    if not (alone := _alone(things, "shape")):
        return None
    thing = draw.choice(alone)
    return Question("colour", f"what colour is {thing.shape}", thing.colour)


def _shape(things, draw) -> Question | None:
    if not (alone := _alone(things, "colour")):
        return None
    thing = draw.choice(alone)
    return Question("shape", f"what shape is {thing.colour}", thing.shape)


def _count(things, draw) -> Question:
    """Numbers from zero to three or more, about equally often."""
    shapes = [thing.shape for thing in things]
    counts = dict(zip(PLURALS, map(shapes.count, SHAPES), strict=True)) | {"things": len(things)}
    wanted = draw.choice(sorted(set(counts.values())))
    what = draw.choice([name for name, count in counts.items() if count == wanted])
    return Question("count", f"how many {what}", NUMBERS[wanted])


def _position(things, draw) -> Question:
    thing = draw.choice(things)
    return Question("position", f"where is {thing.colour} {thing.shape}", PLACES[thing.cell])


def _presence(things, draw) -> Question:
    """Yes as often as no; where it can be, what is absent has the colour of one thing and the shape of another."""
    looks = {(thing.shape, thing.colour) for thing in things}
    mixed = [(one.shape, other.colour) for one in things for other in things]
    absent = [look for look in mixed if look not in looks] or [
        (shape, colour) for shape in SHAPES for colour in COLOURS if (shape, colour) not in looks
    ]
    there = draw.random() < 0.5
    shape, colour = draw.choice(sorted(looks if there else absent))
    return Question("presence", f"is there {colour} {shape}", "yes" if there else "no")
