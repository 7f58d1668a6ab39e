"""`--components` on the command line, in this process: both parts of a model of images and text at once."""

import json

import pytest
import transformers as t

import rankfold
from families import tiny_model as tiny_text_model
from rankfold.evaluation.complexity import cache_bytes
from tiny_encoders import tiny_encoder
from tiny_pairs import picture, save_llava, tiny_model, write_pairs
from warm import rankfold as rankfold_command

COMMON = "--method modegpt --rank-multiple 2 --num-samples 12 --device cpu"
PARTS = f"--components language=0.4,vision=0.2 {COMMON}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """LLaVA with its processor, models of one part, examples, and a text."""
    folder = tmp_path_factory.mktemp("parts")
    save_llava(folder / "llava")
    tiny_text_model("llama").save_pretrained(folder / "llama")
    tiny_encoder("vit-head").save_pretrained(folder / "vit")
    write_pairs(folder, 20)
    (folder / "text.txt").write_text("some text " * 200)
    return folder


@pytest.fixture(scope="module")
def small(place):
    """How the command that compresses both components ended, and what it printed."""
    return rankfold_command(*f"compress llava -o small {PARTS} --calibration pairs.jsonl".split(), cwd=place)


def same_weights(one, other) -> bool:
    first, second = (rankfold.load(folder, device="cpu").state_dict() for folder in (one, other))
    return first.keys() == second.keys() and all((tensor == second[name]).all() for name, tensor in first.items())


def test_from_one_file_to_a_checkpoint_that_sees(run, place, small):
    out, err = small.stdout, small.stderr
    assert small.returncode == 0, err
    assert "small, vision: llava by modegpt, 20." in out and "small, language: llava by modegpt, 40." in out
    assert "cosine of the last states" in out and "perplexity" in out
    heads = [line.split() for line in out.splitlines() if line.endswith("  compressed")]
    assert heads == [["dense", "compressed"], ["before", "compressed"]]  # the tower is compressed before the language
    assert err.index("llava, vision: modegpt, sparsity 0.2") < err.index("llava, language: modegpt, sparsity 0.4")
    assert (place / "small").is_dir() and not [
        *place.glob("small.*"),
        *place.glob(".small.*"),
    ]  # "small.partial", a lock
    assert not (place / "small" / "before").exists()
    processor = t.AutoProcessor.from_pretrained(place / "small")
    model = t.AutoModelForImageTextToText.from_pretrained(place / "small").eval()
    inputs = processor(text="<image>who?", images=picture(3), return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None).shape[1] > 3
    code, out, _ = run("inspect small")
    assert code == 0 and "llava, vision, compressed" in out and "llava, language, compressed" in out
    assert out.count("counted weights removed") == 2
    assert "on 12 x 4 patches of pairs.jsonl" in out and "on 12 image-text examples of" in out


def test_the_card_says_both_and_its_command_makes_the_same(run, place, small):
    card = (place / "small" / "README.md").read_text()
    record = json.loads((place / "small" / "rankfold.json").read_text())
    dense, small = tiny_model("llava").num_parameters(), rankfold.load(place / "small").num_parameters()
    assert f"| parameters | {dense:,} | {small:,} |" in card
    caches = cache_bytes(tiny_model("llava")), cache_bytes(rankfold.load(place / "small", device="cpu"))
    assert "| KV-cache bytes per token | {:,} | {:,} |".format(*caches) in card
    for one, part in ((record["before"], "vision"), (record, "language")):
        counts = one["counts"]
        left = counts["counted_weights"] - counts["removed_weights"]
        assert f"of {part} (linear weights of the blocks) | {counts['counted_weights']:,} | {left:,} |" in card
    assert "last states of vision | 1 | 0." in card and "perplexity of language |" in card
    assert "held-out calibration sample, both after the other compressed components |" in card
    assert "12 x 4 patches of `pairs.jsonl`" in card and "12 image-text examples of" in card
    assert "import AutoModelForImageTextToText, AutoProcessor" in card
    (line,) = [line for line in card.splitlines() if line.startswith("rankfold compress")]
    code, _, err = run(f"{line.removeprefix('rankfold ')} --device cpu")
    assert code == 0, err
    assert same_weights(place / "small", place / "small-again")


def test_a_calibration_for_each(run, place):
    """Text and a folder of images; the command on the card names both."""
    code, out, err = run(
        f"compress llava -o each {PARTS} --calibration vision=images/ --calibration language=text.txt --max-length 64 "
        "--json"
    )
    assert code == 0, err
    found = json.loads(out)["components"]
    assert found["vision"]["held_out"]["cosine"] and found["language"]["held_out"]["perplexity"]
    record = json.loads((place / "each" / "rankfold.json").read_text())
    assert [one["calibration"]["source"] for one in (record["before"], record)] == ["images", "text.txt"]
    source = rankfold.open_model(place / "llava", device="cpu", component="vision")
    method = rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2)
    small = rankfold.compress(
        source, method=method, calibration=rankfold.load_calibration(place / "images", source, num_samples=12)
    ).model
    both = rankfold.load(place / "each", device="cpu").state_dict()
    for name, tensor in small.state_dict().items():
        assert "vision_tower" not in name or (both[name] == tensor).all(), name


def test_a_record_repeats_what_only_python_can_say(run, place):
    """Methods that differ in more than their sparsity, and draws of their own."""
    sources = [rankfold.open_model(place / "llava", device="cpu", component=name) for name in ("vision", "language")]
    methods = [
        rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2, exclude_blocks=(0,)),
        rankfold.MoDeGPT(sparsity=0.4, rank_multiple=4),
    ]
    images = rankfold.load_calibration(place / "images", sources[0], num_samples=8, seed=3)
    text = rankfold.load_calibration(place / "text.txt", sources[1], num_samples=4, max_length=32)
    rankfold.compress_components(zip(sources, methods, (images, text), strict=True), place / "differ")
    code, _, err = run("compress --config differ/rankfold.json -o alike --device cpu")
    assert code == 0, err
    assert same_weights(place / "differ", place / "alike")


def test_both_plans(run, place):
    line = f"llava {PARTS} --calibration pairs.jsonl"
    code, out, err = run(f"plan {line} --json -o plan.json")
    assert code == 0, err
    plans = json.loads(out)["components"]
    assert json.loads((place / "plan.json").read_text()) == {"components": plans} and list(plans) == [
        "vision",
        "language",
    ]
    for part, asked in (("vision", 0.2), ("language", 0.4)):
        assert plans[part]["part"] == part and asked <= plans[part]["sparsity"] < asked + 0.08
        assert plans[part]["seconds"] is not None and plans[part]["modules"][0]["relative_error"] is not None
    code, out, err = run(f"compress {line} --dry-run")
    assert code == 0 and "llava, vision: modegpt" in out and "llava, language: modegpt" in out, err


@pytest.mark.parametrize(
    "line, said",
    [
        ("llava --component vision", "each with its own sparsity, --component is of one; leave one of them out"),
        ("llava --sparsity 0.3", "each with its own sparsity, --sparsity is of one; leave one of them out"),
        ("llava --moments m", "each with its own sparsity, --moments is of one; leave one of them out"),
        ("llava --modules mlp=0.2,vo=0.1", "--modules mlp=0.2,vo=0.1 would take its place; name the modules only"),
        (
            "llava --calibration a.txt",
            "one .jsonl file of image-text examples (or hub:OWNER/NAME), or COMPONENT=... for each",
        ),
        ("llava --calibration a.jsonl --calibration b.jsonl", "or COMPONENT=... for each"),
        ("llava --calibration vision=images", "or COMPONENT=... for each"),
        ("llava --calibration vision=images --calibration a.txt", "got vision=images and a.txt"),
        ("llava --calibration vision=~nouser/x --calibration language=text.txt", "there is no user whose home is"),
        ("llava --calibration vision=images --calibration language=nowhere.txt", "no text at 'nowhere.txt'"),
        ("llava --calibration vision=nowhere --calibration language=text.txt", "no images at 'nowhere'"),
        (
            "llama",
            "LlamaForCausalLM has the component language, got vision; name none",
        ),
        ("vit", "has the component vision, got language; name none"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(run, place, line, said):
    fitting = "" if "--calibration" in line else "--calibration pairs.jsonl"
    for command in ("compress", "plan"):
        code, out, err = run(f"{command} {line} -o never {PARTS} {fitting if '--moments' not in line else ''}")
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1, err
        assert not (place / "never").exists() and not (place / "never.partial").exists()


def test_a_projector_is_a_part_too(run, place):
    line = f"llava --components projector=0.3,language=0.3,vision=0.2 {COMMON} --calibration pairs.jsonl"
    code, _, err = run(f"compress {line} -o three")
    assert code == 0, err
    assert err.index("llava, vision:") < err.index("llava, projector:") < err.index("llava, language:")
    card = (place / "three" / "README.md").read_text()
    assert "of projector (linear weights" in card
    code, out, _ = run("inspect three")
    assert code == 0 and out.count("counted weights removed") == 3 and "llava, projector, compressed" in out


@pytest.mark.parametrize(
    "parts, said",
    [
        (
            "languge=0.3,vision=0.2",
            "unknown component 'languge'; did you mean 'language'? available: vision, projector, language",
        ),
        (
            "language=0.3",
            "--components takes two components or more, e.g. language=0.3,vision=0.2; got 'language=0.3'; "
            "for one of them give",
        ),
        ("language=0.3,language=0.2", "--components names 'language' more than once; name it once"),
        (
            "language,vision",
            "--components takes a sparsity for each, e.g. language=0.3,vision=0.2; got 'language,vision'",
        ),
        ("language=0.3,vision=much", "--components takes a sparsity for each"),
        ("language=0.3,vision=1.5", "sparsity must be in [0, 1), got 1.5"),
        ("language=0.3,vision=nan", "sparsity must be a finite number, got nan"),
        (",", "--components takes two components or more"),
    ],
)
def test_parts_that_do_not_parse_are_one_line(run, parts, said):
    code, _, err = run(f"compress llava -o never --components {parts} --calibration pairs.jsonl")
    assert code == 2 and said in err and err.count("\n") == 1, err
