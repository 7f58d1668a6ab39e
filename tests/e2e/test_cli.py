"""The commands as a user runs them, in this process (the interpreter start is the slow part)."""

import fnmatch
import importlib.util
import io
import json
import re
import shutil
import sys

import pytest
import torch

from rankfold._utils.sizes import size_text
from saved import save_gguf, save_text, save_tiny
from warm import rankfold


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save_tiny(folder / "model")
    save_text(folder / "text.txt")
    return folder


SHORT = "--num-samples 4 --max-length 32 --device cpu"
CALIBRATION = "--calibration text.txt --num-samples 8 --max-length 64 --device cpu"


@pytest.fixture(scope="module")
def small(place):
    """A compressed checkpoint made by the command line."""
    return compressed(place, "small", "")


@pytest.fixture(scope="module")
def even(place):
    """One whose blocks are all narrower, so that a stock class is too."""
    return compressed(place, "even", "--method modegpt ")


def compressed(place, folder: str, method: str) -> dict:
    line = f"compress model -o {folder} {method}--sparsity 0.3 --rank-multiple 2 {CALIBRATION} --json"
    done = rankfold(*line.split(), cwd=place)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compress_prints_one_json_object_and_writes_a_whole_checkpoint(small, place):
    assert small["output"] == "small" and small["sparsity"] >= 0.3
    names = {p.name for p in (place / "small").iterdir()}
    assert {"config.json", "README.md", "rankfold.json", "modeling_rankfold.py", "tokenizer.json"} <= names
    assert "model.safetensors.index.json" in names and not any(
        n.endswith((".bin", ".pt", ".pkl", ".tmp")) for n in names
    )
    assert not (place / "small.partial").exists()


def made_again(place, run, name: str) -> None:
    """Run the command in the card of a checkpoint, which makes ``NAME-again``."""
    card = (place / name / "README.md").read_text()
    (command,) = (line for line in card.splitlines() if line.startswith("rankfold compress"))
    assert command == f"rankfold compress model --config {name}/rankfold.json -o {name}-again"
    code, _, err = run(f"{command.removeprefix('rankfold ')} --device cpu")
    assert code in (0, None), err


def assert_same_weights(place, name: str) -> None:
    for shard in (place / name).glob("*.safetensors"):
        assert shard.read_bytes() == (place / f"{name}-again" / shard.name).read_bytes()


def test_the_command_in_the_card_makes_the_same_weights(small, place, run):
    made_again(place, run, "small")
    assert_same_weights(place, "small")


def test_the_command_in_the_card_names_the_column_that_was_read(place, run):
    rows = "".join(
        json.dumps({"text": "no", "body": part}) + "\n" for part in (place / "text.txt").read_text().split(".")
    )
    (place / "columns.jsonl").write_text(rows)
    options = f"--method modegpt --rank-multiple 2 {SHORT} --calibration columns.jsonl --text-column"
    code, _, err = run(f"compress model -o of-column {options} body")
    assert code in (0, None), err
    made_again(place, run, "of-column")
    assert_same_weights(place, "of-column")


def test_without_an_output_the_folder_is_named_after_model_method_and_sparsity(place, run):
    line = "--method modegpt --rank-multiple 2 --calibration text.txt --num-samples 4 --max-length 32 --device cpu"
    code, out, err = run(f"compress model --sparsity 0.25 {line}")
    assert code in (0, None), err
    assert out.startswith("model-modegpt-0.25: model by modegpt, 2")
    assert (place / "model-modegpt-0.25" / "config.json").exists()
    code, out, err = run(f"compress ./model/ --sparsity 0.25 {line}")
    assert code == 2 and "model-modegpt-0.25 exists already" in err and err.count("\n") == 1
    assert not (place / "model-modegpt-0.3").exists()


@pytest.mark.parametrize("family, format", [("llama", "gguf-deci"), ("qwen3", "gguf")])
def test_a_size_of_a_gguf_file_ends_with_the_command_that_makes_it(family, format, place, run):
    save_tiny(place / family, blocks=2, family=family, head_dim=8, intermediate_size=96)
    line = "--method modegpt --rank-multiple 2 --calibration text.txt --num-samples 4 --max-length 32 --device cpu"
    code, out, err = run(f"compress {family} --target-size 95kB:float16 {line}")
    assert code in (0, None), err
    name = f"{family}-modegpt-95kB-float16"
    (found,) = re.findall(rf"rankfold export {name} -o {name}.gguf --format {format} --dtype float16", out)
    code, _, err = run(found.removeprefix("rankfold "))
    assert code in (0, None), err
    taken = (place / f"{name}.gguf").stat().st_size
    assert f"asked for at most 95.00 kB as a GGUF file in float16: got {size_text(taken)}\n" in out and taken <= 95e3


def test_a_run_ends_with_what_came_out_and_the_next_commands(small, place, run):
    from rankfold.report.record import read_record

    code, out, err = run("compress --config small -o told --device cpu")
    assert code in (0, None) and "--config" not in err, err
    record = read_record(place / "told")
    plan, held_out = record["plan"], record["held_out"]
    lines = [line.split() for line in out.splitlines()]
    change = f"{plan['parameters_after'] / plan['parameters'] - 1:+.1%}"
    assert ["parameters", f"{plan['parameters']:,}", f"{plan['parameters_after']:,}", change] in lines
    (found,) = (line for line in lines if line[:1] == ["perplexity"])
    assert found[1:3] == [f"{held_out[key]:.2f}" for key in ("perplexity_dense", "perplexity")]
    commands = [line.strip() for line in out.partition("next:\n")[2].splitlines()]
    assert [command.split()[:3] for command in commands] == [
        ["rankfold", "evaluate", "told"],
        ["rankfold", "generate", "told"],
        ["rankfold", "export", "told"],
        ["rankfold", "push", "told"],
    ]
    assert "\x1b" not in out and not any(line.endswith(" ") for line in out.splitlines())


def test_what_is_given_beside_a_record_comes_first(small, place, run):
    code, out, err = run(
        "compress --config small/rankfold.json --sparsity 0.2 --method modegpt --dry-run --device cpu --json"
    )
    assert code in (0, None), err
    method = json.loads(out)["method"]
    assert (method["method"], method["sparsity"]) == ("modegpt", 0.2)


def test_another_model_or_text_of_the_recorded_name_is_said(small, place):
    (place / "elsewhere").mkdir()
    save_tiny(place / "elsewhere" / "model", blocks=1)
    (place / "elsewhere" / "text.txt").write_text((place / "text.txt").read_text()[500:])
    line = "compress --config ../small -o other --sparsity 0.1 --device cpu"
    done = rankfold(*line.split(), cwd=place / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert "the model is not the one of --config: its weights are others" in done.stderr
    assert "the calibration samples are not those of --config" in done.stderr
    done = rankfold(*f"{line.replace('other', 'meant')} --num-samples 4".split(), cwd=place / "elsewhere")
    assert "its weights are others" in done.stderr and "calibration samples are not" not in done.stderr


def test_inspect(small, run):
    code, out, _ = run("inspect small")
    assert code in (0, None) and "counted weights removed" in out and "\u2026" not in out
    code, as_json, _ = run("inspect small --json")
    record = json.loads(as_json)
    assert record["counts"]["sparsity"] >= 0.3
    sizes = [f"{part['kv_bytes_per_token']:,}" for part in (record["plan"], record["counts"])]
    assert f"KV-cache bytes per token {' '.join(sizes)} " in " ".join(out.split())


def test_inspect_takes_a_record_without_held_out_windows(small, place, run):
    shutil.copytree(place / "small", place / "older")
    record = json.loads((place / "older" / "rankfold.json").read_text())
    del record["held_out"]
    (place / "older" / "rankfold.json").write_text(json.dumps(record))
    code, out, err = run("inspect older")
    assert code in (0, None) and "held-out" not in out, err


def test_evaluate_and_its_definition(small, run, caplog):
    code, out, _ = run("evaluate small --text text.txt --max-length 64 --limit 2 --device cpu --json")
    result = json.loads(out)
    assert code in (0, None) and result["windows"] == 2 and "non-overlapping" in result["definition"]
    assert "calibrated or trained on this very text" in caplog.text


def test_evaluate_several_texts_and_tasks_at_once(small, place, run):
    save_gguf(place / "model", place / "tiny.gguf")
    (place / "rows").mkdir()
    row = {"goal": "a class", "sol1": "an object", "sol2": "an integer", "label": 0}
    lines = [json.dumps(row | {"goal": f"{word} class", "label": i % 2}) for i, word in enumerate(("a", "the", "no"))]
    (place / "rows" / "piqa_val.jsonl").write_text("\n".join(lines))
    options = (
        "--text text.txt --text pydoc --tasks piqa --include-path rows --max-length 64 --limit 2 --device cpu --json"
    )
    for model in ("model", "small", "tiny.gguf"):
        code, out, err = run(f"evaluate {model} {options}")
        assert code in (0, None), err
        result = json.loads(out)
        assert [text["text"] for text in result["texts"]] == ["text.txt", "pydoc"]
        assert all(text["tokens_per_second"] > 0 and text["windows"] == 2 for text in result["texts"])
        assert result["tasks"]["piqa"]["samples"] == 2 and "acc_stderr" in result["tasks"]["piqa"]
        assert {"torch", "lm_eval", "rankfold"} <= set(result["versions"])
    alone = json.loads(run("evaluate tiny.gguf --text pydoc --max-length 64 --limit 2 --device cpu --json")[1])
    assert alone["perplexity"] == result["texts"][1]["perplexity"] and alone["model"] == "tiny.gguf"
    code, out, _ = run(f"evaluate small {options.removesuffix('--json')}")
    assert (
        code in (0, None) and re.search(r"piqa .* acc .* \d\.\d{4} .* \d\.\d{4} ", out) and out.count("tokens/s") == 2
    )


def test_evaluate_speed_beside_the_dense_model(small, run, monkeypatch):
    monkeypatch.setattr("rankfold.evaluation.speed.STEPS", 4)  # of 32 that a context of 128 tokens has room for
    code, out, err = run("evaluate small --speed --baseline model --batch-sizes 1,2 --device cpu --json")
    assert code in (0, None), err
    cost = json.loads(out)["cost"]
    assert list(cost["models"]) == ["model", "small"] and cost["environment"]["threads"] >= 1
    dense, less = cost["models"]["model"], cost["models"]["small"]
    for key in ("parameters", "bytes_on_disk", "kv_bytes_per_token", "macs_per_token", "flops_per_token"):
        assert 0 < less[key] < dense[key]
    assert [batch["batch"] for batch in cost["batches"]] == [1, 2]
    for batch in cost["batches"]:
        assert batch["models"]["model"]["prefill_ratio"] == batch["models"]["model"]["decode_ratio"] == 1
        low, high = batch["models"]["small"]["decode_range"]
        assert 0 < low <= batch["models"]["small"]["decode_tokens_per_second"] <= high
    code, out, _ = run("evaluate small --speed --batch-sizes 1 --device cpu")
    assert code in (0, None) and "KV-cache bytes per token" in out and "decode" in out


def test_generate(small, run):
    code, out, _ = run("generate small hello --max-new-tokens 4 --device cpu --json")
    assert code in (0, None) and json.loads(out)["prompt"] == "hello"


def test_chat_takes_a_line_of_a_pipe_a_turn(small, run, monkeypatch):
    lines = "hello\n\n" + "long " * 200 + "\nand \udce9\nand you\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = run("chat small --max-new-tokens 4 --device cpu")
    assert code in (0, None) and len(out.splitlines()) >= 2
    long, broken = (line for line in err.splitlines() if line.startswith("rankfold: "))
    assert "write a shorter one, or choose a smaller --max-new-tokens" in long and "not UTF-8" in broken
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, said, err = run("chat small --max-new-tokens 4 --device cpu --json")
    turns = json.loads(said)["turns"]
    assert code in (0, None) and [turn["content"] for turn in turns[::2]] == ["hello", "and you"]
    assert out.split() == " ".join(turn["content"] for turn in turns[1::2]).split()
    assert "small has no chat template: it continues your text" in err


def test_calibrate_once_then_plan_and_compress_many(place, run, caplog):
    with caplog.at_level("INFO"):
        code, _, err = run(f"calibrate model -o moments {CALIBRATION}")
    assert caplog.text.count("memory about ") == 1
    assert code in (0, None), err
    code, out, _ = run(
        "plan model --method modegpt --moments moments --sparsity 0.2 --rank-multiple 2 --device cpu "
        "--json -o plan.json"
    )
    plan = json.loads(out)
    assert plan == json.loads((place / "plan.json").read_text())
    assert all(m["relative_error"] is not None for m in plan["modules"])
    code, out, err = run(
        "compress model -o from-moments --method modegpt --moments moments --sparsity 0.2 --rank-multiple 2 "
        "--device cpu --json"
    )
    assert code in (0, None), err
    assert json.loads(out)["removed_weights"] == plan["removed_weights"]
    code, out, _ = run(
        "compress model --method modegpt --moments moments --sparsity 0.2 --rank-multiple 2 --device cpu --dry-run"
    )
    assert code in (0, None) and "counted weights" in out


@pytest.mark.parametrize("allocation", ["influence", "influence-modules"])
def test_influence_in_sequential_mode(run, allocation, place):
    code, _, err = run(f"compress model -o {allocation} --allocation {allocation} --rank-multiple 2 {CALIBRATION}")
    assert code in (0, None), err
    record = json.loads((place / allocation / "rankfold.json").read_text())
    assert len(record["plan"]["facts"]["scores"]) == 4


@pytest.mark.parametrize("wrong", ["--exclude-blocks 9", "--sparsity 0.99"])
def test_what_an_allocation_cannot_reach_is_said_before_it_measures(run, place, wrong, monkeypatch):
    monkeypatch.setattr("rankfold.pipeline.measure", None)
    code, _, err = run(f"compress model -o early --allocation influence --rank-multiple 2 {CALIBRATION} {wrong}")
    assert code == 2 and err.count("\n") == 1 and not (place / "early.partial").exists()


MIX = "--calibration text.txt=0.7 --calibration other.txt=0.3 --num-samples 16 --max-length 64 --device cpu"


@pytest.fixture(scope="module")
def other(place):
    """A second text, and one whose name looks like a share."""
    save_text(place / "other.txt", copies=2)
    (place / "text=0.5").write_text("\n".join(f"row {i * i}" for i in range(2000)))


def texts_of(folder) -> list:
    calibration = json.loads((folder / "rankfold.json").read_text())["calibration"]
    return [(text["source"], text["share"], text["num_samples"], text["held_out"]) for text in calibration["texts"]]


def test_a_mix_of_texts_is_in_plan_record_and_card_and_can_be_repeated(run, place, other):
    code, out, err = run(f"plan model --rank-multiple 2 {MIX} --json")
    assert code in (0, None), err
    assert [t["share"] for t in json.loads(out)["calibration"]["texts"]] == [0.7, 0.3]
    code, _, err = run(f"compress model -o mixed --rank-multiple 2 {MIX}")
    assert code in (0, None), err
    assert re.search(r"samples of text\.txt.*11 \+ 1 held out.*70\.0%", err)
    assert re.search(r"samples of other\.txt.*5 \+ 1 held out.*30\.0%", err)
    assert texts_of(place / "mixed") == [("text.txt", 0.7, 11, 1), ("other.txt", 0.3, 5, 1)]
    card = (place / "mixed" / "README.md").read_text()
    assert "16 x 64 tokens of `text.txt=0.7 + other.txt=0.3`" in card
    made_again(place, run, "mixed")
    assert_same_weights(place, "mixed")
    code, out, _ = run("inspect mixed")
    assert "calibrated on 16 x 64 tokens of text.txt=0.7 + other.txt=0.3" in out


def test_a_mix_of_short_texts_can_be_repeated(run, place, other):
    """Too short for all samples: the card's command must ask for as many again, or the texts give other windows."""
    (place / "few.txt").write_text((place / "text.txt").read_text()[:1200])
    (place / "some.txt").write_text((place / "text=0.5").read_text()[:3000])
    line = (
        "--calibration few.txt --calibration some.txt --num-samples 64 --max-length 64 --rank-multiple 2 --device cpu"
    )
    code, _, err = run(f"compress model -o short-mix {line}")
    assert code in (0, None), err
    made_again(place, run, "short-mix")
    records = [
        json.loads((place / n / "rankfold.json").read_text())["calibration"] for n in ("short-mix", "short-mix-again")
    ]
    assert records[0] == records[1] and records[0]["num_samples"] < 64
    assert_same_weights(place, "short-mix")


def test_moments_of_a_mix_are_those_of_that_mix_alone(run, place, other):
    code, _, err = run(f"calibrate model -o of-mix {MIX}")
    assert code in (0, None), err
    assert json.loads((place / "of-mix" / "moments.json").read_text())["tokens"]["texts"][0]["num_samples"] == 11
    code, _, err = run(f"calibrate model -o of-mix {MIX.replace('0.7', '0.8')}")
    assert code == 2 and "it differs in: tokens" in err
    code, out, err = run("compress model --method modegpt --moments of-mix --rank-multiple 2 --device cpu --dry-run")
    assert code in (0, None) and re.search(r"samples of text\.txt.*11 \+ 1 held out", out), err


def test_evaluate_knows_every_text_of_a_mix(run, place, other, caplog):
    code, _, err = run(f"compress model -o of-two --rank-multiple 2 {MIX}")
    assert code in (0, None), err
    for text, warned in (("text.txt", True), ("other.txt", True), ("pydoc", False)):
        caplog.clear()
        assert run(f"evaluate of-two --text {text} --max-length 64 --limit 1 --device cpu")[0] in (0, None)
        assert ("calibrated or trained on this very text" in caplog.text) is warned


@pytest.mark.parametrize(
    ("given", "sources"),
    [
        ("text=0.5", ["text=0.5"]),  # the file of that name
        ("text=0.5=2", ["text=0.5"]),
        ("text.txt=2", ["text.txt"]),
        ("wikitext2:text=0.5=1 --calibration self=3", ["wikitext2:text=0.5", "self"]),
    ],
)
def test_a_file_may_have_an_equals_sign_in_its_name(run, place, other, given, sources):
    line = f"plan model --calibration {given} --num-samples 4 --max-length 32 --rank-multiple 2 --device cpu --json"
    code, out, err = run(line)
    assert code in (0, None), err
    calibration = json.loads(out)["calibration"]
    assert [text["source"] for text in calibration.get("texts", [calibration])] == sources


def test_self_calibration_needs_no_data(run, place):
    code, _, err = run(
        "compress model -o self --calibration self --num-samples 3 --max-length 16 --rank-multiple 2 --device cpu"
    )
    assert code in (0, None), err
    assert json.loads((place / "self" / "rankfold.json").read_text())["calibration"]["origin"] == "self"


def test_latentllm_by_one_switch(run, place):
    code, _, err = run(f"compress model -o latent --method latentllm --rank-multiple 2 --set window=0 {CALIBRATION}")
    assert code in (0, None), err
    assert json.loads((place / "latent" / "rankfold.json").read_text())["options"]["window"] == 0


BAD = [
    ("compress model -o x --sparsity 1", r"sparsity must be in \[0, 1\), got 1.0"),
    ("compress model -o x --method svdd", "unknown method 'svdd'; did you mean 'svd'"),
    ("compress model -o x --modules mlp=0.3,qk", "--modules takes"),
    ("compress model -o x --set ridge", "--set takes KEY=VALUE"),
    ("compress model -o x --set rigde=1", "unknown rankfold option 'rigde'; did you mean 'ridge'"),
    ("compress model -o x --calibration nowhere.txt", "no text at 'nowhere.txt'"),
    ("compress model -o x --calibration empty.txt", "is empty"),
    (
        "compress model -o x --calibration text.txt --calibration text.txt",
        "'text.txt' is named more than once; name it",
    ),
    ("compress model -o x --calibration text.txt=1 --calibration text.txt=2", "'text.txt' is named more than once"),
    (
        "compress model -o x --calibration text.txt=1 --calibration self",
        "takes a share for every text or for none, e.g.",
    ),
    (
        "compress model -o x --calibration text.txt=0 --calibration self=1",
        "share of calibration text 'text.txt' must be",
    ),
    ("compress model -o x --calibration text.txt=nan", "share of calibration text 'text.txt' must be a number above 0"),
    ("compress model -o x --calibration text.txt=half", "no text at 'text.txt=half'"),
    ("compress model -o x --calibration =0.5", "no text at '=0.5'"),
    (
        "compress model -o x --calibration text.txt --calibration self --num-samples 1",
        "2 calibration texts need at least",
    ),
    ("compress model -o x --calibration text.txt --calibration empty.txt", "text source 'empty.txt' is empty"),
    ("compress model -o x --calibration short.txt", "at least 32 are needed"),
    ("compress model -o x --calibration rows.jsonl", "has no text column 'text'; the row has: body"),
    ("compress model -o x --dtype int8 --calibration text.txt", "dtype must be auto"),
    ("compress model -o x --device tpu --calibration text.txt", "device must be auto"),
    ("compress model -o existing --calibration text.txt", "existing exists already"),
    ("compress model -o no/such/folder/x --calibration text.txt", "is not a folder; make it first"),
    ("compress missing -o x", "no model at 'missing'"),
    ("compress unknown -o x", "model type 'albert' as LlamaForCausalLM is not one"),
    ("compress truncated -o x --calibration text.txt", "not a readable safetensors file"),
    (
        "compress nan -o x --method modegpt --calibration text.txt --num-samples 2 --max-length 32",
        "up_proj.weight has 1 NaN",
    ),
    ("compress pickled -o x --calibration text.txt", "reads safetensors and GGUF only"),
    ("compress mismatch -o x --calibration text.txt", "tokenizer and model do not belong together"),
    ("compress model -o x --method modegpt --moments nowhere", "is not a moments folder"),
    ("compress model -o x --mode both --calibration text.txt", "mode must be sequential or one-pass"),
    ("compress model --dry-run --mode one-pass --calibration text.txt", "takes text and mode sequential, not moments"),
    (
        "compress model -o x --rank-multiple 64 --calibration text.txt --modules qk,vo --method modegpt",
        "cannot be reached",
    ),
    ("compress model -o x --exclude-blocks 9 --calibration text.txt", "excluded block 9 is not in the model"),
    ("evaluate missing --text text.txt", "no model at 'missing'"),
    ("evaluate unsaid --text text.txt --max-length 32", "config.json does not name the calibration set"),
    ("evaluate model --text text.txt --max-length 1", "a sample of 1 token predicts none"),
    ("evaluate model", "nothing to evaluate; give --text, --tasks, --generation or --speed"),
    ("evaluate model --text text.txt --text text.txt", "--text names 'text.txt' more than once"),
    ("evaluate model --text text.txt --include-path .", "--include-path would be ignored without --tasks"),
    ("evaluate model --text text.txt --num-fewshot 1", "--num-fewshot would be ignored without --tasks"),
    ("evaluate model --text text.txt --baseline small", "--baseline would be ignored without --speed"),
    ("evaluate model --tasks piqa --include-path nowhere", "--include-path nowhere is not a folder"),
    ("evaluate model --tasks piqa --include-path .", "has no questions of piqa; put its rows there as piqa.jsonl"),
    ("evaluate model --tasks picqa --include-path .", "did you mean 'piqa'?"),
    ("evaluate model --speed --batch-sizes 1,x", "--batch-sizes takes numbers such as 1,8,32; got '1,x'"),
    ("evaluate model --speed --baseline model", "--baseline is the model itself"),
    ("generate model x --max-new-tokens 0", "max-new-tokens must be >= 1"),
    ("chat model --max-new-tokens 0", "max-new-tokens must be >= 1"),
    ("chat model --system x", "--system needs a chat template, and the model has none; leave it out"),
    ("inspect model", "model has no rankfold.json: not a checkpoint written by"),
    ("inspect nowhere", "there is no folder nowhere: not a checkpoint written by"),
    ("compress model --target-size 10kB", "a larger size a lower one; sparsity 0."),
    ("compress small -o x --calibration text.txt", "already compressed or quantised"),
]


@pytest.fixture(scope="module")
def broken(place, small):
    """Models and texts with one thing wrong each."""
    (place / "empty.txt").write_text("\n \n")
    (place / "short.txt").write_text("too short")
    (place / "rows.jsonl").write_text('{"body": "x"}\n')
    (place / "existing").mkdir()
    for name in ("unknown", "truncated", "nan", "pickled", "mismatch"):
        shutil.copytree(place / "model", place / name)
    config = json.loads((place / "unknown" / "config.json").read_text())
    (place / "unknown" / "config.json").write_text(json.dumps(config | {"model_type": "albert"}))
    shutil.copytree(place / "small", place / "unsaid")
    config = json.loads((place / "unsaid" / "config.json").read_text())
    config["quantization_config"]["calibration"] = {"texts": "abc"}
    (place / "unsaid" / "config.json").write_text(json.dumps(config))
    weights = place / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    from safetensors.torch import load_file, save_file

    state = load_file(place / "nan" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, place / "nan" / "model.safetensors")
    (place / "pickled" / "model.safetensors").unlink()
    torch.save({}, place / "pickled" / "pytorch_model.bin")
    config = json.loads((place / "mismatch" / "config.json").read_text())
    (place / "mismatch" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    state = load_file(place / "mismatch" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:100].clone()
    save_file(state, place / "mismatch" / "model.safetensors")


@pytest.mark.parametrize("line, message", BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(run, broken, place, line, message):
    extra = " --device cpu" if line.split()[0] == "compress" and "--device" not in line else ""
    code, out, err = run(line + extra)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("rankfold: ") and re.search(message, last), err
    assert "Traceback" not in err and out == ""
    assert not (place / "x").exists()
    left = place / "x.partial"
    if line.startswith(
        "compress nan"
    ):  # found in the second block: the first is kept, and cannot be mistaken for a result
        assert not (left / "config.json").exists()
        shutil.rmtree(left)
    assert not left.exists()


def test_an_unreachable_hub_says_how_to_go_on(run, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    code, _, err = run("compress owner/name -o x")
    assert code == 2 and "cannot get 'owner/name' from the hub (no route to host)" in err
    assert "give the folder" in err


def test_a_hub_id_is_downloaded_without_pickles(run, monkeypatch, place):
    """The hub stands in a local folder; what is asked of it must exclude anything that can run code."""
    import huggingface_hub

    asked = {}

    def fake(name, revision, allow_patterns, ignore_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        assert any(fnmatch.fnmatch("consolidated.safetensors", p) for p in ignore_patterns)  # the weights once more
        return str(place / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    code, _, err = run(f"compress owner/name -o from-hub --rank-multiple 2 {CALIBRATION}")
    assert code in (0, None), err
    assert asked["name"] == "owner/name" and asked["revision"] is None
    assert not any(pattern in ("*", "*.bin", "*.py", "*.pt") for pattern in asked["patterns"])


def test_help_has_examples(run):
    for command in ("compress", "calibrate", "plan", "evaluate", "export", "generate", "chat", "inspect", "models"):
        code, out, _ = run(f"{command} --help")
        assert code in (0, None) and f"rankfold {command}" in out


@pytest.mark.parametrize("kind, options", [("stock", ""), ("deci", ""), ("gguf", "--dtype q8_0"), ("gguf-deci", "")])
def test_export_says_what_is_left_of_the_saving(even, place, run, kind, options):
    code, out, err = run(f"export even -o even-{kind} --format {kind} {options} --json")
    assert code in (0, None), err
    result = json.loads(out)
    counts = result["parameters"]
    assert counts["compressed"] == even["parameters"] <= counts["exported"] < counts["dense"]
    assert result["saving_kept"] == (counts["dense"] - counts["exported"]) / (counts["dense"] - counts["compressed"])
    assert result["difference"] < 0.1 and (place / f"even-{kind}").exists() and not list(place.glob("*rankfold*"))
    code, _, err = run(f"export even -o even-{kind} --format {kind}")
    assert code == 2 and err == f"rankfold: even-{kind} exists already; choose another folder or remove it\n"


def test_export_prints_counts(even, run):
    code, out, err = run("export even -o printed")
    assert code in (0, None), err
    first, second, _ = out.splitlines()  # the third: what keeps all of the saving
    assert re.fullmatch(r"printed: parameters [\d,]+ dense, [\d,]+ compressed, [\d,]+ exported", first)
    assert re.fullmatch(r"\d+% of the saving kept; read back, its logits differ by \S+ of their norm", second)
    code, out, err = run("export model -o dense.gguf --format gguf")
    assert code in (0, None), err
    assert re.fullmatch(r"dense.gguf: [\d,]+ parameters, of a dense model; read back, its logits .* norm\n", out)
    code, _, err = run("export model -o not")
    assert code == 2 and err == "rankfold: model is a stock model already, nothing is to be exported: use it as it is\n"


def test_compare_writes_a_report_and_says_what_failed(run, place, monkeypatch):
    pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")
    from undrawn import draw_only

    line = (
        "compare model --methods modegpt:rank_multiple=2,latentllm:joint=ud --sparsities 0.2,0.4 "
        f"{CALIBRATION} -o compared "
    )
    line += "--text text.txt --text-length 32 --limit 2"
    with monkeypatch.context() as patch:
        draw_only(patch)
        code, out, err = run(line)
    assert code == 1 and err.count("cannot take the joint form") == 2 and "failed" in out and "Traceback" not in err, (
        err
    )
    assert out.splitlines()[-1] == "compared: report.html, table.md, results.jsonl, plots"
    code, out, err = run(f"{line.replace(',latentllm:joint=ud', '')} --json")
    result = json.loads(out)
    assert code == 0 and result["failed"] == 0 and [row["sparsity"] for row in result["rows"]] == [0.0, 0.2, 0.4]
    page = (place / "compared" / "report.html").read_text()
    assert page.count("failed [") == 2 and "cannot take the joint form" in page  # of the first command


def test_compare_keeps_hidden_states_elsewhere_and_writes_the_same_bytes(run, place, monkeypatch):
    """Of a row that shares the moments of the dense model, and of one that measures its own."""
    pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")
    from rankfold.calibration.offload import StatesOnDisk
    from undrawn import draw_only

    draw_only(monkeypatch)
    kept, keep = [], StatesOnDisk._keep
    monkeypatch.setattr(StatesOnDisk, "_keep", lambda self, *given: (kept.append(self.folder), keep(self, *given))[1])
    (place / "states").mkdir()
    line = f"compare model --methods modegpt:rank_multiple=2,rankfold:rank_multiple=2 --sparsities 0.3 {SHORT} --keep"
    line += " --calibration text.txt --text text.txt --text-length 32 --limit 2"
    assert run(f"{line} -o plain")[0] == 0 and not kept
    assert run(f"{line} -o away --offload states")[0] == 0
    assert len(kept) > 10 and {folder.name for folder in kept} == {"states"} and not [*(place / "states").iterdir()]
    plain, away = (sorted((place / name / "cells").glob("*/*.safetensors")) for name in ("plain", "away"))
    assert [path.parts[-2:] for path in plain] == [path.parts[-2:] for path in away] and len(plain) >= 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(plain, away, strict=True))
    records = [json.loads(path.read_text()) for path in (place / "away" / "cells").glob("*/rankfold.json")]
    assert [record["run"]["offload"] for record in records] == ["disk", "disk"]


def test_compare_without_its_libraries_says_what_to_install(run, place, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    code, _, err = run(f"compare model --methods svd --sparsities 0.2 {CALIBRATION} -o without --text text.txt")
    assert (code, err) == (
        2,
        "rankfold: the report needs matplotlib, which is not installed; pip install 'rankfold[report]'\n",
    )
    assert not (place / "without").exists()


def test_compare_names_the_length_of_its_texts(place, run):
    (place / "short.txt").write_text("few words")
    code, _, err = run(f"compare model --methods svd --sparsities 0.2 {CALIBRATION} -o never --text short.txt")
    assert code == 2 and "short.txt: the text has " in err and err.endswith("use a smaller --text-length\n")
    assert not (place / "never").exists()
