"""Tasks through lm-eval against prompts written out and scored by hand, and against lm-eval left alone."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import datasets
import lm_eval
import pytest
import torch

from rankfold._utils import progress
from rankfold.checkpoint.load import load_model, load_tokenizer
from rankfold.errors import CheckpointError, DataError, NumericsError, OptionError
from rankfold.evaluation.local_tasks import MMLU_MATH
from rankfold.evaluation.science_qa import by_column
from rankfold.evaluation.tasks import Questions
from saved import save_tiny

WORDS = ("class", "object", "method", "import", "value", "an integer", "the operator", "a list of names")
LETTERS = {"label": ["A", "B", "C"], "text": list(WORDS[:3])}


def rows(task: str, n: int = 6) -> list[dict]:
    """Rows as the hub has them."""
    words = [WORDS[i % len(WORDS)] for i in range(3 * n)]
    made = {
        "piqa": lambda i: {"goal": words[i], "sol1": words[i + 1], "sol2": words[i + 2] * 2, "label": i % 2},
        "arc_easy": lambda i: {"question": f"{words[i]}?", "choices": LETTERS, "answerKey": "ABC"[i % 3]},
        "openbookqa": lambda i: {"question_stem": f"The {words[i]} is", "choices": LETTERS, "answerKey": "ABC"[i % 3]},
        "winogrande": lambda i: {
            "sentence": f"The {words[i]} and the rest: _ is {words[i + 3]}.",
            "option1": words[i + 1],
            "option2": words[i + 2],
            "answer": "12"[i % 2],
        },
        "hellaswag": lambda i: {
            "activity_label": words[i],
            "ctx_a": "A class is there.",
            "ctx_b": words[i + 1],
            "endings": [words[i + 2], f"{words[i]} [step] again", words[i + 4]],
            "label": "012"[i % 3],
        },
        "lambada_openai": lambda i: {"text": f"{words[i]} is a {words[i + 1]} and a class"},
        "boolq": lambda i: {"question": f"is {words[i]} it", "passage": f"It is {words[i + 1]}.", "answer": i % 3 > 0},
        "copa": lambda i: {
            "premise": f"The {words[i]} was called.",
            "choice1": f"It returned {words[i + 1]}.",
            "choice2": f"It raised {words[i + 2]}.",
            "question": ("cause", "effect")[i % 2],
            "label": i % 2,
        },
        "scienceqa": lambda i: {
            "question": f"What is {words[i]}?",
            "choices": words[i : i + 2 + i % 2],
            "answer": i % 2,
            "hint": words[i + 1] if i % 3 else "",
            "subject": ("natural science", "language science", "social science")[i % 3],
            "grade": f"grade{1 + 2 * i}",
        },
    }
    return [made[task](i) for i in range(n)]


def written_out(task: str, row: dict) -> tuple[list[tuple[str, str]], int]:
    """What is scored, (context, continuation) for every choice, and the number of the right one."""
    if task == "piqa":
        return [(f"Question: {row['goal']}\nAnswer:", f" {row[s]}") for s in ("sol1", "sol2")], row["label"]
    if task == "arc_easy":
        return [(f"Question: {row['question']}\nAnswer:", f" {t}") for t in LETTERS["text"]], "ABC".index(
            row["answerKey"]
        )
    if task == "openbookqa":
        return [(row["question_stem"], f" {t}") for t in LETTERS["text"]], "ABC".index(row["answerKey"])
    if task == "winogrande":
        before, after = row["sentence"].split("_")
        return [(before + row[o], f" {after.strip()}") for o in ("option1", "option2")], int(row["answer"]) - 1
    if task == "hellaswag":
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return [(context, " " + e.replace(" [step] ", " ")) for e in row["endings"]], int(row["label"])
    if task == "boolq":
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        return [(context, " no"), (context, " yes")], int(row["answer"])
    if task == "copa":
        context = row["premise"][:-1] + {"cause": " because", "effect": " therefore"}[row["question"]]
        return [(context, " " + row[c][0].lower() + row[c][1:]) for c in ("choice1", "choice2")], row["label"]
    context = f"Context: {row['hint']}\n" if row["hint"] else ""
    return [(f"{context}Question: {row['question']}\nAnswer:", f" {c}") for c in row["choices"]], row["answer"]


@torch.no_grad()
def score(network, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood token by token, and whether each is the most likely one; read is what the context has room for."""
    ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    lost = max(0, len(ids) - 1 - network.config.max_position_embeddings)
    ids, start = ids[lost:], start - lost
    logits = network(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    pairs = [(logits[t - 1, ids[t]].item(), logits[t - 1].argmax().item() == ids[t]) for t in range(start, len(ids))]
    return sum(value for value, _ in pairs), all(best for _, best in pairs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tasks") / "model", blocks=2)
    return load_model(folder, device="cpu"), load_tokenizer(folder)


def write(folder, name: str, values: list[dict]):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
    return folder


def evaluate_tasks(network, tokenizer, tasks, **how):
    if "folder" in how:
        how["folder"] = str(how["folder"])
    return Questions(tasks, **how).measure(network, tokenizer)


CHOSEN = ["piqa", "arc_easy", "openbookqa", "winogrande", "hellaswag", "boolq", "copa", "scienceqa"]


def test_accuracies_are_those_of_prompts_scored_by_hand(tiny, tmp_path):
    for task in CHOSEN:
        write(tmp_path, f"{task}_val", rows(task))
    found = evaluate_tasks(*tiny, CHOSEN, folder=tmp_path, batch_size=3)
    seen = set()
    for task in CHOSEN:
        right = []
        for row in rows(task):
            pairs, answer = written_out(task, row)
            values = [score(*tiny, *pair)[0] for pair in pairs]
            right.append(values.index(max(values)) == answer)
        accuracy = sum(right) / len(right)
        assert found[task]["acc"] == pytest.approx(accuracy), task
        error = math.sqrt(accuracy * (1 - accuracy) / (len(right) - 1))
        assert found[task]["acc_stderr"] == pytest.approx(error) and found[task]["samples"] == len(right)
        seen.add(accuracy)
    assert len(seen) > 2  # otherwise nothing was told apart


def test_lm_eval_is_silent_and_answers_are_counted(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    before = logging.getLogger("lm_eval").level  # a command that ran in this process has set it
    for task in ("piqa", "lambada_openai"):
        write(tmp_path, f"{task}_val" if task == "piqa" else "lambada_test", rows(task))
    evaluate_tasks(*tiny, ["piqa", "lambada_openai"], folder=tmp_path)
    out, err = capfd.readouterr()
    answers = 2 * len(rows("piqa")) + len(rows("lambada_openai"))
    lines = [line.partition(",")[0] + line.partition(",")[2].partition(",")[0] for line in err.splitlines()]
    assert out == "" and lines == [f"answering piqa lambada_openai: {n} of {answers}" for n in range(1, answers + 1)]
    assert logging.getLogger("lm_eval").level == before


def test_lambada_is_its_last_word(tiny, tmp_path):
    write(tmp_path, "lambada_test", rows("lambada_openai"))
    found = evaluate_tasks(*tiny, ["lambada_openai"], folder=tmp_path)["lambada_openai"]
    texts = [row["text"].rpartition(" ") for row in rows("lambada_openai")]
    scores = [score(*tiny, context, f" {word}") for context, _, word in texts]
    assert found["perplexity"] == pytest.approx(math.exp(-sum(s for s, _ in scores) / len(scores)), rel=1e-4)
    assert found["acc"] == sum(best for _, best in scores) / len(scores) and found["perplexity_stderr"] > 0


def mathematics(n: int) -> list[dict]:
    """Rows of the subjects of ``mmlu_math``, ``n`` of each, as the hub has them."""
    subjects = [name.removeprefix("mmlu_") for name in MMLU_MATH]
    return [
        {
            "question": f"{WORDS[(i + j) % 8]} of {WORDS[i]}?",
            "subject": subject,
            "choices": [*WORDS[i : i + 4]],
            "answer": (i + j) % 4,
        }
        for j, subject in enumerate(subjects)
        for i in range(n + (j == 0))
    ]


def test_the_mathematics_of_mmlu_has_examples_of_its_own_subject_and_counts_every_question(tiny, tmp_path):
    def asked(row: dict) -> str:
        choices = [f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
        return "\n".join([row["question"], *choices, "Answer:"])

    questions, examples = mathematics(2), mathematics(3)[::-1]
    write(tmp_path, "mmlu_math_test", questions)
    write(tmp_path, "mmlu_math_dev", examples)
    right = []
    for row in questions:
        subject = row["subject"].replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        shown = [f"{asked(one)} {'ABCD'[one['answer']]}\n\n" for one in examples if one["subject"] == row["subject"]][
            :2
        ]
        context = head + "".join(shown) + asked(row)
        values = [score(*tiny, context, f" {letter}")[0] for letter in "ABCD"]
        right.append(values.index(max(values)) == row["answer"])
    found = evaluate_tasks(*tiny, ["mmlu_math:2"], folder=tmp_path)
    assert set(found) == {"mmlu_math"} and found["mmlu_math"]["acc"] == pytest.approx(sum(right) / len(right))
    assert found["mmlu_math"]["samples"] == len(right)
    assert 0 < sum(right) < len(right) == 11


def test_prompts_that_are_cut_are_counted(tiny, tmp_path, caplog):
    write(tmp_path, "mmlu_math_test", mathematics(2))
    write(tmp_path, "mmlu_math_dev", mathematics(3))
    write(tmp_path, "piqa_val", rows("piqa", n=3))
    network, _ = tiny
    found = evaluate_tasks(*tiny, ["piqa", "mmlu_math:2"], folder=tmp_path)
    assert found["mmlu_math"]["truncated"] == 4 * 11 and "truncated" not in found["piqa"]
    (line,) = caplog.messages
    assert line.startswith("the model takes 128 tokens: the beginning was cut off from 44 prompts (mmlu_")
    context = network.config.max_position_embeddings
    network.config.max_position_embeddings = 2048
    try:
        found = evaluate_tasks(*tiny, ["mmlu_math:2"], folder=tmp_path)
    finally:
        network.config.max_position_embeddings = context
    assert "truncated" not in found["mmlu_math"] and len(caplog.messages) == 1


def test_mathqa_is_the_text_of_five_choices(tiny, tmp_path):
    made = [
        {
            "Problem": f"what is {i} ?",
            "options": f"a ) {i} , b ) {i + 1} , c ) {WORDS[i]} , d ) none , e ) all",
            "correct": "abcde"[i],
        }
        for i in range(5)
    ]
    right = 0
    for i, row in enumerate(made):
        choices = [f" {text}" for text in (i, i + 1, WORDS[i], "none", "all")]
        values = [score(*tiny, f"Question: {row['Problem']}\nAnswer:", choice)[0] for choice in choices]
        right += values.index(max(values)) == i
    write(tmp_path, "mathqa", made)
    assert evaluate_tasks(*tiny, ["mathqa"], folder=tmp_path)["mathqa"]["acc"] == pytest.approx(right / 5)


def test_tasks_that_cannot_be_run_are_named_with_the_reason(tmp_path):
    write(tmp_path, "piqa_val", rows("piqa"))
    write(tmp_path, "mmlu_math_test", mathematics(1))
    asked = Questions(["piqa", "mathqa", "mmlu_math:5"], str(tmp_path))
    assert asked.left_out() == {
        "mathqa": f"{tmp_path.name} has no questions of mathqa",
        "mmlu_math:5": f"{tmp_path.name} has no examples of mmlu_math",
    }
    with pytest.raises(OptionError, match="names 'mmlu_math' more than once"):
        Questions(["mmlu_math:5", "mmlu_math"], str(tmp_path)).check()


def test_limit_takes_the_first_questions(tiny, tmp_path):
    write(tmp_path, "piqa", rows("piqa"))
    limited = evaluate_tasks(*tiny, ["piqa"], folder=tmp_path, limit=3)["piqa"]
    write(tmp_path, "piqa", rows("piqa")[:3])
    assert limited == evaluate_tasks(*tiny, ["piqa"], folder=tmp_path)["piqa"] and limited["samples"] == 3


@pytest.fixture
def hub(monkeypatch):
    """A hub that has one data set, and what was asked of it."""
    asked = []

    def load_dataset(path, name=None, **options):
        asked.append((path, name, options))
        made = rows("scienceqa", 4) if "ScienceQA" in path else rows("piqa", 6)
        if "ScienceQA" in path:
            made = [{**row, "image": "picture.png" if i == 1 else None} for i, row in enumerate(made)]
        splits = ("train", "validation", "test")
        return datasets.DatasetDict({split: datasets.Dataset.from_list(made) for split in splits})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_hubs_rows_and_a_file_of_them_give_the_same(tiny, tmp_path, hub, monkeypatch):
    from_hub = evaluate_tasks(*tiny, ["piqa"])
    assert hub == [("baber/piqa", None, {})]
    monkeypatch.undo()
    assert from_hub == evaluate_tasks(*tiny, ["piqa"], folder=write(tmp_path, "piqa", rows("piqa")))


def test_examples_are_drawn_as_lm_eval_draws_them(tiny, tmp_path, hub, monkeypatch):
    from lm_eval import evaluator, tasks
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    manager = tasks.TaskManager(include_defaults=False, include_path=f"{tasks.__path__[0]}/piqa")
    model = HFLM(pretrained=tiny[0], tokenizer=tiny[1])
    alone = lm_eval.simple_evaluate(model=model, tasks=["piqa"], num_fewshot=2, task_manager=manager, log_samples=True)
    monkeypatch.undo()
    write(tmp_path, "piqa", rows("piqa"))
    with pytest.raises(DataError, match=r"no examples of piqa; put its rows there as piqa_train\.jsonl"):
        evaluate_tasks(*tiny, ["piqa"], folder=tmp_path, num_fewshot=2)
    write(tmp_path, "piqa_train", rows("piqa"))
    prompts, real = [], lm_eval.evaluate

    def evaluate(*args, **options):
        result = real(*args, **options | {"log_samples": True})
        prompts.extend(sample["arguments"] for sample in result["samples"]["piqa"])
        return result

    monkeypatch.setattr(lm_eval, "evaluate", evaluate)
    found = evaluate_tasks(*tiny, ["piqa"], folder=tmp_path, num_fewshot=2)["piqa"]
    assert prompts == [sample["arguments"] for sample in alone["samples"]["piqa"]]
    assert {key: found[key] for key in ("acc", "acc_stderr", "acc_norm")} == {
        key: alone["results"]["piqa"][f"{key},none"] for key in ("acc", "acc_stderr", "acc_norm")
    }
    assert found["num_fewshot"] == 2


def test_questions_with_a_picture_are_left_out(tiny, hub):
    found = evaluate_tasks(*tiny, ["scienceqa"])["scienceqa"]
    assert hub[0][0] == "derek-thomas/ScienceQA" and found["samples"] == 3
    assert {name: column["samples"] for name, column in found["columns"].items()} == {
        "NAT": 2,
        "LAN": 0,
        "SOC": 1,
        "TXT": 1,
        "IMG": 0,
        "NO": 2,
        "G1-6": 2,
        "G7-12": 1,
    }


def test_columns_by_hand():
    base = {"subject": "social science", "hint": "", "grade": "grade6"}
    changes = [
        {},
        {"hint": "x", "image": "a.png"},
        {"grade": "grade7", "image": None},
        {"subject": "natural science", "grade": "grade12"},
    ]
    samples = [
        {"doc": base | change, "acc": value} for change, value in zip(changes, (1.0, 0.0, 1.0, 0.0), strict=True)
    ]
    table = by_column(samples)
    assert table["SOC"] == {"acc": 2 / 3, "acc_stderr": pytest.approx(1 / 3), "samples": 3}
    assert table["NAT"] == {"acc": 0.0, "acc_stderr": None, "samples": 1}
    assert table["LAN"] == {"acc": None, "acc_stderr": None, "samples": 0}
    assert table["G1-6"]["acc"] == table["G7-12"]["acc"] == 0.5
    assert table["TXT"]["samples"] == table["IMG"]["samples"] == 1 and table["NO"]["acc"] == 2 / 3


def test_a_score_that_is_no_number_is_an_error(tiny, tmp_path):
    network = load_model(tiny[0].name_or_path, device="cpu")
    network.lm_head.weight.data[7] = torch.nan
    with pytest.raises(NumericsError, match="score of an answer is NaN or infinite"):
        evaluate_tasks(network, tiny[1], ["piqa"], folder=write(tmp_path, "piqa", rows("piqa")))


def test_an_unreachable_hub_is_one_line(tiny, monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        CheckpointError, match=r"questions of piqa cannot be read \(no route to the hub\); .*include_path"
    ):
        evaluate_tasks(*tiny, ["piqa"])


def test_a_task_that_is_not_read_from_files_is_not_sent_there(tiny, monkeypatch):
    """gsm8k without the hub: the advice led to the line that its rows are not read from files."""
    questions = Questions(["piqa", "gsm8k"])
    monkeypatch.setattr("rankfold.evaluation.tasks._manager", lambda names: SimpleNamespace(load=_unreachable))
    with pytest.raises(
        CheckpointError, match=r"piqa, gsm8k cannot be read .*only arc_challenge, .* can be asked, from"
    ):
        questions._load(Path())


def _unreachable(names):
    raise ConnectionError("no route to the hub")


def test_an_unknown_task_is_compared_with_all_of_lm_evals(tiny, monkeypatch):
    from lm_eval import tasks

    real, built = tasks.TaskManager, []

    def manager(**options):  # all of it takes many seconds to read
        built.append(options)
        return real(include_defaults=False, include_path=f"{tasks.__path__[0]}/anli")

    monkeypatch.setattr(tasks, "TaskManager", manager)
    with pytest.raises(OptionError, match="unknown task 'anli_r4'; did you mean 'anli_r3'"):
        Questions(["anli_r4"]).check()  # before a model is loaded and texts are measured
    with pytest.raises(OptionError, match="unknown task 'anli_r4'"):
        evaluate_tasks(*tiny, ["anli_r4"])
    assert built == [{}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 2}, "row 2 has no sound answer: label has to be 0 or 1"),
        ({"label": True}, "row 2: label should be int, got bool"),
        ({"goal": None}, "row 2: goal should be str, got NoneType"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path, change, message):
    good = rows("piqa")
    write(tmp_path, "piqa", [good[0], good[1] | change])
    with pytest.raises(DataError, match=message):
        Questions(["piqa"], str(tmp_path)).check()


def test_files_are_found_by_name(tmp_path):
    with pytest.raises(DataError, match=r"has no questions of piqa; put its rows there as piqa\.jsonl"):
        Questions(["piqa"], str(tmp_path)).check()
    write(tmp_path, "piqa_val", rows("piqa"))
    Questions(["piqa"], str(tmp_path)).check()
    write(tmp_path, "piqa_test", rows("piqa"))
    with pytest.raises(DataError, match=r"several files for piqa: piqa_test\.jsonl, piqa_val\.jsonl"):
        Questions(["piqa"], str(tmp_path)).check()
    (tmp_path / "copa.jsonl").write_text("\n")
    with pytest.raises(DataError, match="is empty; one question a line"):
        Questions(["copa"], str(tmp_path)).check()
    (tmp_path / "copa.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="row 1 is list, not an object"):
        Questions(["copa"], str(tmp_path)).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": [""]}, "tasks is empty"),
        ({"tasks": ["piqa", "piqa"]}, "names 'piqa' more than once"),
        ({"limit": 0}, "limit must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"num_fewshot": -1}, "num_fewshot must be >= 0, got -1"),
        ({"tasks": ["piqaa"], "folder": "."}, "task 'piqaa' is not read from files; did you mean 'piqa'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        Questions(**{"tasks": ["piqa"]} | options).check()


def test_without_lm_eval_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'rankfold\[tasks\]'"):
        Questions(["piqa"]).check()


def test_a_grade_that_is_no_number_is_said_before_anything_is_asked(tmp_path):
    write(tmp_path, "scienceqa", [row | {"grade": "K"} for row in rows("scienceqa")])
    with pytest.raises(DataError, match="row 1 has no sound answer: .*the grade such as grade3"):
        Questions(["scienceqa"], str(tmp_path)).check()
