"""LatentLLM's Table 4 and Fig. 6 in small: what is left of a model of images and text, by kind of question.

A model of LLaVA's architecture (picture_model.py) is trained here on pictures that pictures.py draws, and kept in
`--work`. Its language model is compressed, calibrated on image-text examples by its own processor (`load_calibration`);
also with the vision tower compressed before by the same method, and calibrated on such questions and answers without
the pictures. Asked about pictures and texts of a test that shares none with training. A killed run goes on.

    python benchmarks/images_and_text.py
"""

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor

import common
import picture_model
import pictures
from experiment import of_name
from rankfold import compress, load_calibration, make_method, open_model
from rankfold.errors import NumericsError, OptionError

NAMES = (
    *("identity", "hessian", "l1", "l2", "covariance", "rootcov", "rootcov + block identity", "latentllm (joint)"),
    *("modegpt, the paper's module forms, uniform ranks, our ridge", "modegpt", "rankfold"),
)
METHODS = {name: name for name in NAMES} | {"rootcov": "svd-llm"}  # the paper's rows store plain factors
CASES = {  # name -> whether the tower is compressed too, and the examples the language model is calibrated on
    "language": (False, "pairs"),
    "language and vision": (True, "pairs"),
    "language, calibrated on text": (False, "text"),
}
MULTIPLE = 2  # of ranks: heads have 16 dimensions
ROWS, QUESTIONS, BATCH = 560, 400, 200  # in a file; of a kind in the test, asked at once
SAMPLES = {"pairs": 256, "text": 512}  # fitted: about as many tokens of either
DEFINITIONS = {
    "accuracy": "by kind: share of the test questions whose answer, one word, is the likeliest next token of all",
    "stderr": "by kind: standard error of that share, sqrt(p (1 - p) / (n - 1)), over the n questions of the kind",
    "mean": "of the accuracies of all kinds",
    "mean_stderr": "its standard error, the questions taken as independent",
    "chance": "by kind: share of the answer that is most frequent in the test",
    "parameters": "of the whole model",
    "compress_seconds": "of the language model, from examples to the compressed model in memory",
}


def main() -> None:
    parser = common.arguments(__doc__, "images_and_text")
    parser.add_argument("--work", type=Path, default=Path("images_and_text.work"), help="folder for model and pictures")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=NAMES)
    parser.add_argument("--case", nargs="+", choices=CASES, default=tuple(CASES))
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3, 0.5, 0.1, 0.4, 0.2])
    args = parser.parse_args()
    picture_model.prepare(args.work / "model")
    write_examples(args.work)
    source = opened(args.work / "model")
    source.model = source.whole_model()  # asked as it is, too
    source.weights = None
    examples = {
        name: load_calibration(args.work / f"{name}.jsonl", source, num_samples=n) for name, n in SAMPLES.items()
    }
    asked = test_questions()
    tests = batches_of(asked, AutoProcessor.from_pretrained(args.work / "model"))
    record = common.Record(args.json, protocol(source, examples, asked), DEFINITIONS, resume=True)
    if "dense" not in record:
        record.add("dense", sparsity=0.0, **measured(source.model, tests), parameters=source.model.num_parameters())
    for sparsity in args.sparsity:
        for case in args.case:
            for name in args.only:
                add(record, args.work, tests, examples, (case, name, sparsity))
    common.say(f"wrote {common.shown(str(args.json))}")


def opened(model: Path, part: str = "language"):
    source = open_model(model, device="cpu", component=part)
    source.autocast = None
    return source


def protocol(source, examples: dict, asked: list) -> dict:
    leave = {"origin", "held_out_sha256"}
    answers = {kind: [q.answer for q, _ in asked if q.kind == kind] for kind in pictures.KINDS}
    return {
        "model": {"name": "llava of pictures", "fingerprint": source.fingerprint, "blocks": len(source)},
        "vision": picture_model.SEES,
        "language": picture_model.READS,
        "training": picture_model.TRAINING,
        "calibration": {
            name: {key: value for key, value in common.as_recorded(some.describe()).items() if key not in leave}
            for name, some in examples.items()
        },
        "questions": {kind: len(found) for kind, found in answers.items()},
        "chance": {kind: max(map(found.count, found)) / len(found) for kind, found in answers.items()},
        "rank_multiple": MULTIPLE,
    }


def add(record: common.Record, work: Path, tests: list, examples: dict, row: tuple[str, str, float]) -> None:
    """Compress as asked for, and ask."""
    case, name, sparsity = row
    label = f"{case}: {name} {sparsity}"
    if label in record:
        return
    with_tower, calibration = CASES[case]
    facts = {"case": case, "setting": name, "sparsity": sparsity, "method": method(name, sparsity).describe()}
    try:
        source = opened(tower(work, name, sparsity) if with_tower else work / "model")
        begin = time.perf_counter()
        model = compress(source, method=method(name, sparsity), calibration=examples[calibration]).model
        facts["compress_seconds"] = time.perf_counter() - begin
    except (NumericsError, OptionError) as error:  # a method that cannot do it is a result of this table
        record.add(label, **facts, error=f"not compressed: {error}")
        return common.say(f"{label}: not compressed: {error}")
    record.add(label, **facts, **(found := measured(model, tests)), parameters=model.num_parameters())
    common.say(f"{label}: {found['mean']:.3f}")


def method(name: str, sparsity: float):
    kind, options = of_name(METHODS[name])
    return make_method(kind, sparsity=sparsity, rank_multiple=MULTIPLE, **options)


def tower(work: Path, name: str, sparsity: float) -> Path:
    """The model with its vision tower compressed, which is kept."""
    folder = work / "towers" / f"{name} {sparsity}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        source = opened(work / "model", "vision")
        images = load_calibration(work / "pairs.jsonl", source, num_samples=SAMPLES["pairs"])
        compress(source, method=method(name, sparsity), calibration=images, output=folder)
    return folder


def write_examples(work: Path) -> None:
    """`pairs.jsonl`: all kinds in turn, about scenes of the training; `text.jsonl`: the same without pictures."""
    if (work / "text.jsonl").exists():
        return
    draw, rows = random.Random(2), []
    (work / "images").mkdir(parents=True, exist_ok=True)
    while len(rows) < ROWS:
        kind, file = pictures.KINDS[len(rows) % len(pictures.KINDS)], f"images/{len(rows)}.png"
        found = [pair for pair in asked_about(pictures.scene(draw), draw, test=False) if pair[0].kind == kind]
        if not found:
            continue
        question, image = found[0]
        if image is not None:
            Image.fromarray(image).save(work / file)
        row = {"question": question.text, "answer": question.answer} | ({"image": file} if image is not None else {})
        rows.append(row)
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = [{key: value for key, value in row.items() if key != "image"} for row in rows]
    (work / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))


def asked_about(things, draw: random.Random, test: bool) -> list[tuple[pictures.Question, np.ndarray | None]]:
    """Questions with a picture, and without one after a text, where these are of the test, or of training."""
    found, text = [], pictures.described(things)
    if pictures.in_test(pictures.key_of(things)) == test:
        image = pictures.drawn(things, draw.getrandbits(32))
        found = [(question, image) for question in pictures.questions(things, draw)]
    if pictures.in_test(text) == test:
        texts = pictures.text_questions(things, draw)[:1]
        found += [(question._replace(text=f"{text} {question.text}"), None) for question in texts]
    return found


def test_questions() -> list[tuple[pictures.Question, np.ndarray | None]]:
    """The same number of every kind."""
    draw, found = random.Random(1), {kind: [] for kind in pictures.KINDS}
    while any(len(some) < QUESTIONS for some in found.values()):
        for question, image in asked_about(pictures.scene(draw), draw, test=True):
            if len(found[question.kind]) < QUESTIONS:
                found[question.kind].append((question, image))
    return [pair for some in found.values() for pair in some]


def batches_of(asked: list, processor) -> list[tuple[list[str], torch.Tensor, dict]]:
    """Kinds, ids of the answers and inputs, as the model's processor makes them; with pictures or without."""
    found = []
    for begin in range(0, len(asked), BATCH):
        some = asked[begin : begin + BATCH]
        turns = [[{"role": "user", "content": content(question, image)}] for question, image in some]
        inputs = processor.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        answers = torch.tensor(processor.tokenizer.convert_tokens_to_ids([question.answer for question, _ in some]))
        found.append(([question.kind for question, _ in some], answers, dict(inputs)))
    return found


def content(question: pictures.Question, image: np.ndarray | None) -> list[dict]:
    shown = [] if image is None else [{"type": "image", "image": Image.fromarray(image)}]
    return [*shown, {"type": "text", "text": question.text}]


@torch.no_grad()
def measured(model: nn.Module, tests: list) -> dict:
    """Accuracy by kind."""
    right = {kind: [] for kind in pictures.KINDS}
    for kinds, answers, inputs in tests:
        said = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)
        for kind, hit in zip(kinds, (said == answers).tolist(), strict=True):
            right[kind].append(hit)
    accuracy = {kind: sum(hits) / len(hits) for kind, hits in right.items()}
    stderr = {kind: math.sqrt(p * (1 - p) / (len(right[kind]) - 1)) for kind, p in accuracy.items()}
    mean, spread = sum(accuracy.values()) / len(accuracy), math.hypot(*stderr.values()) / len(accuracy)
    return {"accuracy": accuracy, "stderr": stderr, "mean": mean, "mean_stderr": spread}


if __name__ == "__main__":
    main()
