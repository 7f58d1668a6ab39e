"""LatentLLM's Table 4 and Fig. 6: what a model of images and text still answers, by column of ScienceQA.

SmolLM2-135M with a vision tower (seeing_model.py) is trained here on questions in ScienceQA's form (picture_rows.py),
and kept in `--work`. Its vision tower, its language model or both are compressed, calibrated on image-text examples of
the training. It is asked as by `rankfold evaluate MODEL --tasks scienceqa`, about scenes of a test that shares none
with training; the dense one also with the picture of another question, or noise, in place of each picture. A killed run
goes on where it was.

    python benchmarks/science_qa.py
"""

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor

import common
import picture_rows
import seeing_model
from rankfold import compress, load, load_calibration, make_method, open_model, perplexity
from rankfold.evaluation.science_qa import prompt_of
from rankfold.evaluation.with_pictures import ask

METHODS = ("latentllm", "modegpt", "rankfold")
CASES = {  # name -> components, in the order in which they are compressed
    "language": ("language",),
    "vision": ("vision",),
    "language and vision": ("vision", "language"),
}
SHOWN = {"dense": "own", "dense, pictures of other questions": "other", "dense, noise for pictures": "noise"}
EXAMPLES, BATCH = 128, 32  # calibrated on; asked at once
WINDOWS, LENGTH = 8, 1024  # of WikiText-2, for what training leaves of the language model
DEFINITIONS = {
    "acc": "share of the questions whose letter the model writes, read as by LLaVA's script; stderr: lm-eval's",
    "answered": "share of the questions for which it writes the letter of any choice",
    "columns": "column of ScienceQA -> acc, its standard error and the questions in it",
    "parameters": "of the whole model",
    "compress_seconds": "from an open model to the compressed one, of all its components",
}


def main() -> None:
    parser = common.arguments(__doc__, "science_qa")
    common.add_data(parser)
    parser.add_argument(
        "--model", default="smollm2", help="language model: smollm2 (of the wheel), a .gguf file or folder"
    )
    parser.add_argument("--work", type=Path, default=Path("science_qa.work"), help="folder for model and pictures")
    parser.add_argument("--questions", type=int, default=40, help="of each kind in the test")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--case", nargs="+", choices=CASES, default=tuple(CASES))
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3, 0.5, 0.1, 0.4, 0.2])
    args = parser.parse_args()
    model = args.work / "model"
    seeing_model.prepare(model, args.model)
    write_questions(args.work, args.questions)
    write_examples(args.work)
    record = common.Record(args.json, protocol(args), DEFINITIONS, resume=True)
    for name, shown in SHOWN.items():
        if name not in record:
            record.add(name, sparsity=0.0, **measured(load(model), args.work, shown))
    for sparsity in args.sparsity:
        for case in args.case:
            for name in args.only:
                add(record, args.work, case, name, sparsity)
    common.say(f"wrote {common.shown(str(args.json))}")


def protocol(args) -> dict:
    source = open_model(args.work / "model", component="language", device="cpu")
    rows = [json.loads(line) for line in (args.work / "own" / "scienceqa.jsonl").read_text("utf-8").splitlines()]
    kinds = [row["kind"] for row in rows]
    language = common.open_source(args.model)
    test = common.data_file(args.data, "text/wikitext2-test.tokens")
    windows = common.windows(language, test, min(LENGTH, language.context_length))[:WINDOWS]
    networks = {"before": language.whole_model(), "after": load(args.work / "model")}
    return {
        "model": common.describe_model(source) | {"name": "llava of SmolLM2-135M"},
        "language": common.describe_model(language),
        "vision": seeing_model.SEES,
        "training": seeing_model.TRAINING,
        "perplexity": {when: perplexity(one, windows)["perplexity"] for when, one in networks.items()},
        "perplexity_text": common.describe_tokens(windows, test.name),
        "calibration": {"source": "pairs.jsonl", "samples": EXAMPLES},
        "questions": {kind: kinds.count(kind) for kind in picture_rows.SUBJECTS},
        "chance": sum(1 / len(row["choices"]) for row in rows) / len(rows),
    }


def add(record: common.Record, work: Path, case: str, name: str, sparsity: float) -> None:
    """Compress as asked for, and ask."""
    label = f"{case}: {name} {sparsity}"
    if label in record:
        return
    begin = time.perf_counter()
    for number, component in enumerate(CASES[case]):
        source = open_model(
            work / f"small{number - 1}" if number else work / "model", component=component, device="cpu"
        )
        examples = load_calibration(work / "pairs.jsonl", source, num_samples=EXAMPLES)
        folder = work / f"small{number}"
        shutil.rmtree(folder, ignore_errors=True)
        compress(source, method=make_method(name, sparsity=sparsity), calibration=examples, output=folder)
    seconds = time.perf_counter() - begin
    found = measured(load(folder), work, "own")
    record.add(label, case=case, setting=name, sparsity=sparsity, **found, compress_seconds=seconds)
    common.say(f"{label}: {found['acc']:.3f}")


def measured(network: nn.Module, work: Path, shown: str) -> dict:
    """Return the accuracy, products in bf16."""
    processor = AutoProcessor.from_pretrained(work / "model")
    found = ask(network.to(torch.bfloat16), processor, work / shown / "scienceqa.jsonl", batch_size=BATCH)
    return found | {"parameters": sum(p.numel() for p in network.parameters())}


def write_questions(work: Path, each: int) -> None:
    """One folder for each of `SHOWN`: the same questions, with other pictures."""
    asked = picture_rows.rows_of_all_kinds(random.Random(1), True, each)
    own = [image for _, image in asked if image is not None]
    others = [*own[len(own) // 2 :], *own[: len(own) // 2]]  # far away, because neighbours can share a scene
    noise = np.random.default_rng(0).integers(0, 256, (len(own), *own[0].shape), np.uint8)
    for shown, images in (("own", own), ("other", others), ("noise", noise)):
        given = iter(images)
        write(work / shown, "scienceqa", [(row, None if image is None else next(given)) for row, image in asked])


def write_examples(work: Path) -> None:
    """`pairs.jsonl`: questions of training with what the model learnt to write, one of each kind in turn."""
    each = -(-EXAMPLES // len(picture_rows.SUBJECTS)) + 4  # load_calibration holds some out
    asked = picture_rows.rows_of_all_kinds(random.Random(2), False, each)
    rows = [({"question": prompt_of(row), "answer": seeing_model.answer_of(row)}, image) for row, image in asked]
    write(work, "pairs", rows)


def write(folder: Path, name: str, rows: list[tuple[dict, np.ndarray | None]]) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (row, image) in enumerate(rows):
        file = None if image is None else f"images/{number}.png"
        if image is not None:
            Image.fromarray(image).save(folder / file)
        lines.append(json.dumps(row | {"image": file}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
