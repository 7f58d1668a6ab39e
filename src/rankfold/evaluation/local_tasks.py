"""Questions out of local files: lm-eval's own task definitions, with nothing changed but where the rows come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .._utils.files import write_json, write_text
from ..data.text import decode, json_row
from ..errors import DataError, OptionError, option, suggestion
from .science_qa import SCIENCE_QA


class TaskRows(NamedTuple):
    """What the rows of a task look like on the hub, and so in a file."""

    folder: str  # of lm-eval's definition, below its tasks; empty for a task of our own
    prefix: str  # the names of its files begin with this
    fields: dict[str, type]
    sound: Callable[[dict], bool]  # whether a row can be answered
    wanted: str  # the same in words
    changes: dict[str, Any] | None = None  # of lm-eval's definition, beside the place of the rows
    examples: str = "train"  # the split that examples are drawn from; the file with it ends in this
    parts: tuple[str, ...] = ()  # lm-eval's tasks that a group of our own is made of, one for each subject of the rows


def _lettered(row: dict) -> bool:
    labels, texts = row["choices"].get("label"), row["choices"].get("text")
    lists = isinstance(labels, list) and isinstance(texts, list)
    return lists and len(labels) == len(texts) and row["answerKey"].strip() in labels


# The mathematics of MMLU as LowRankArena groups it: benchmark/base/tasks/mmlu_math.yaml of Zishan-Shao/lowrankarena.
MMLU_MATH = (
    "mmlu_abstract_algebra",
    "mmlu_college_mathematics",
    "mmlu_elementary_mathematics",
    "mmlu_high_school_mathematics",
    "mmlu_high_school_statistics",
)
_LETTERS = ("choices", dict), ("answerKey", str)
_ONE_LETTER = "answerKey has to be one of choices.label"
LOCAL = {
    "piqa": TaskRows(
        "piqa",
        "piqa",
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        lambda row: row["label"] in (0, 1),
        "label has to be 0 or 1",
    ),
    "arc_easy": TaskRows("arc", "arc_easy", {"question": str, **dict(_LETTERS)}, _lettered, _ONE_LETTER),
    "arc_challenge": TaskRows("arc", "arc_challenge", {"question": str, **dict(_LETTERS)}, _lettered, _ONE_LETTER),
    "openbookqa": TaskRows(
        "openbookqa", "openbookqa", {"question_stem": str, **dict(_LETTERS)}, _lettered, _ONE_LETTER
    ),
    "winogrande": TaskRows(
        "winogrande",
        "winogrande",
        {"sentence": str, "option1": str, "option2": str, "answer": str},
        lambda row: row["answer"] in ("1", "2") and "_" in row["sentence"],
        'answer has to be "1" or "2", and the sentence needs a _',
    ),
    "hellaswag": TaskRows(
        "hellaswag",
        "hellaswag",
        {"ctx_a": str, "ctx_b": str, "activity_label": str, "endings": list, "label": str},
        lambda row: row["label"] in map(str, range(len(row["endings"]))),
        "label has to be the number of an ending, as a string",
    ),
    "lambada_openai": TaskRows(
        "lambada",
        "lambada",
        {"text": str},
        lambda row: " " in row["text"].strip(),
        "the text needs two words",
    ),
    "boolq": TaskRows(
        "super_glue/boolq",
        "boolq",
        {"question": str, "passage": str, "answer": bool},
        lambda row: True,
        "",
        {"doc_to_target": "{{answer|int}}"},  # lm-eval reads SuperGLUE's copy, where the answer is `label`
    ),
    "copa": TaskRows(
        "super_glue/copa",
        "copa",
        {"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
        lambda row: row["label"] in (0, 1) and row["question"] in ("cause", "effect"),
        "label has to be 0 or 1 and the question cause or effect",
    ),
    "mathqa": TaskRows(
        "mathqa",
        "mathqa",
        {"Problem": str, "options": str, "correct": str},
        lambda row: row["correct"] in tuple("abcde"),
        "correct has to be one of a, b, c, d, e",
    ),
    "mmlu_math": TaskRows(
        "mmlu/default",
        "mmlu_math",
        {"question": str, "subject": str, "choices": list, "answer": int},
        lambda row: f"mmlu_{row['subject']}" in MMLU_MATH and len(row["choices"]) == 4 and row["answer"] in range(4),
        f"answer has to be the number of one of four choices and the subject one of {', '.join(MMLU_MATH)} without "
        "mmlu_",
        examples="dev",
        parts=MMLU_MATH,
    ),
    "scienceqa": TaskRows(
        "",
        "scienceqa",
        {"question": str, "choices": list, "answer": int, "hint": str, "subject": str, "grade": str},
        lambda row: 0 <= row["answer"] < len(row["choices"]) and row["grade"].removeprefix("grade").isdecimal(),
        "answer has to be the number of a choice and the grade such as grade3",
    ),
}


def local_rows(name: str, folder: Path, num_fewshot: int | None) -> dict[str, Path]:
    """Files with the questions (``test``) of a task and, where examples are drawn, with those (``train``); rows
    checked.

    Args:
        name: one of :data:`LOCAL`.
        folder: holds ``PREFIX.jsonl`` or ``PREFIX_ANYTHING.jsonl``, all rows of which are questions, whatever split
            they are of; and ``PREFIX_train.jsonl`` or ``PREFIX_ANYTHING_train.jsonl`` where examples are drawn
            (``_dev`` of MMLU).
        num_fewshot: examples shown before each question.

    Raises:
        OptionError: a task that is not known from files, with a suggestion.
        DataError: no file, several, or rows of another kind.
    """
    if name not in LOCAL:
        hint = suggestion(name, LOCAL)
        raise OptionError(f"task {name!r} is not read from files; {hint}available: {', '.join(sorted(LOCAL))}")
    found, suffix = files_of(name, folder), f"_{LOCAL[name].examples}"
    files = {"test": _one(name, folder, [path for path in found if not path.stem.endswith(suffix)])}
    if num_fewshot:
        files["train"] = _one(name, folder, [path for path in found if path.stem.endswith(suffix)], suffix)
    for path in files.values():
        _check_rows(path, LOCAL[name])
    return files


def local_definitions(name: str, files: dict[str, Path], index, scratch: Path) -> list[str | dict]:
    """What lm-eval loads in place of the task ``name``, or of its parts: the same definitions over other rows.

    Args:
        name: one of :data:`LOCAL`.
        files: see :func:`local_rows`.
        index: lm-eval's tasks by name.
        scratch: folder for the definitions and the data set library's copies of the rows.
    """
    form = LOCAL[name]
    if not form.folder:
        return [SCIENCE_QA | _place_of_rows(form, SCIENCE_QA, files, scratch)]
    found: list[str | dict] = []
    for part in form.parts or (name,):
        rows = _rows_of(part, files, scratch) if form.parts else files
        definition = scratch / f"{part}.yaml"
        place = _place_of_rows(form, index[part].cfg, rows, scratch)
        write_json(definition, {"include": str(index[part].yaml_path), **place})  # JSON is YAML
        found.append(str(definition))
    return found


def _place_of_rows(form: TaskRows, own: dict[str, Any], files: dict[str, Path], scratch: Path) -> dict[str, Any]:
    """Return what of lm-eval's definition ``own`` changes so that rows come from files."""
    # Under its own name: whether lm-eval keeps a question out of its own examples depends on which split it is.
    kind = "test_split" if own.get("test_split") or not own.get("validation_split") else "validation_split"
    names = {"test": own.get(kind) or "test", "train": own.get("training_split") or form.examples}
    examples = "training_split" if form.examples == "train" else "fewshot_split"
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {names[use]: str(path) for use, path in files.items()},
            "cache_dir": str(scratch / "rows"),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        kind: names["test"],
        examples: names["train"] if "train" in files else None,
        **(form.changes or {}),
    }


def _rows_of(part: str, files: dict[str, Path], scratch: Path) -> dict[str, Path]:
    """Return files in ``scratch`` with the rows of the subject that a part of a group is about."""
    subject, found = part.removeprefix("mmlu_"), {}
    for use, path in files.items():
        rows = [line for line in _lines(path) if json_row(line, "a row", path)["subject"] == subject]
        if not rows:
            raise DataError(f"{path} has no row of the subject {subject}; all of {', '.join(MMLU_MATH)} are needed")
        found[use] = scratch / f"{part}_{use}.jsonl"
        write_text(found[use], "\n".join(rows) + "\n")
    return found


def files_of(name: str, folder: Path) -> list[Path]:
    """Return the files with rows of a task.

    Args:
        name: one of :data:`LOCAL`.
        folder: see :func:`local_rows`.

    Raises:
        DataError: it is no folder.
    """
    prefix = LOCAL[name].prefix
    if not folder.is_dir():
        raise DataError(f"{option('include_path')} {folder} is not a folder; give one that holds {prefix}.jsonl")
    return [p for p in sorted(folder.glob("*.jsonl")) if p.stem == prefix or p.stem.startswith(prefix + "_")]


def _one(name: str, folder: Path, found: list[Path], suffix: str = "") -> Path:
    wanted = LOCAL[name].prefix + suffix
    if not found:
        use = "examples" if suffix else "questions"
        raise DataError(f"{folder} has no {use} of {name}; put its rows there as {wanted}.jsonl")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder} has several files for {name}: {names}; leave one of them there")
    return found[0].resolve()


def _lines(path: Path) -> list[str]:
    return [line for line in decode(path.read_bytes(), path).split("\n") if line.strip()]


def _check_rows(path: Path, form: TaskRows) -> None:
    """Raise :class:`DataError` unless every row has the fields of the task."""
    lines = _lines(path)
    if not lines:
        raise DataError(f"{path} is empty; one question a line is expected, with {', '.join(form.fields)}")
    for number, line in enumerate(lines, 1):
        row, where = json_row(line, f"row {number}", path), f"{path}, row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where} is {type(row).__name__}, not an object with {', '.join(form.fields)}")
        for field, kind in form.fields.items():
            if type(row.get(field)) is not kind:  # a bool is no number here
                got = type(row[field]).__name__ if field in row else "nothing"
                raise DataError(
                    f"{where}: {field} should be {kind.__name__}, got {got}; use the hub's rows as they are"
                )
        if not form.sound(row):
            raise DataError(f"{where} has no sound answer: {form.wanted}; use the hub's rows as they are")
