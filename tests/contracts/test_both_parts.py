"""Two parts of a model in one run: as the two runs by hand that it stands for, whatever it is killed at."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as t

import rankfold
from kills import read_state
from rankfold import MoDeGPT, Rankfold
from rankfold.checkpoint.run import RunFolder
from rankfold.errors import CheckpointError, DataError, OptionError, UnsupportedModelError
from rankfold.report.record import records_of
from tiny_encoders import samples_of, tiny_encoder
from tiny_pairs import picture, save_llava, tiny_model, write_pairs

VISION, LANGUAGE = MoDeGPT(sparsity=0.2, rank_multiple=2), MoDeGPT(sparsity=0.4, rank_multiple=2)
PROJECTOR = MoDeGPT(sparsity=0.5, rank_multiple=2)
TOWER, LAYERS = "model.vision_tower.encoder.layers.", "model.language_model.layers."
BLOCKS = {"vision": 2, "language": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """LLaVA with its processor, and examples."""
    folder = tmp_path_factory.mktemp("both")
    save_llava(folder / "dense")
    write_pairs(folder, 20)
    return folder


def opened(place: Path, name: str, folder: str = "dense") -> tuple:
    """A part, and what its images or examples are."""
    source = rankfold.open_model(place / folder, device="cpu", component=name)
    return source, rankfold.load_calibration(place / "pairs.jsonl", source, num_samples=12)


def given(place: Path, vision=VISION, language=LANGUAGE) -> list[tuple]:
    """The parts, the second one first."""
    pairs = {"language": language, "vision": vision}
    return [(source, pairs[name], samples) for name in pairs for source, samples in [opened(place, name)]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return t.AutoModelForImageTextToText.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def both(place):
    return rankfold.compress_components(given(place), place / "at-once").output


def test_it_has_no_stock_form(both, tmp_path):
    with pytest.raises(UnsupportedModelError, match="has more than one compressed part, and a stock model is made of"):
        rankfold.export(both, tmp_path / "stock")
    assert not any(tmp_path.iterdir())


def test_it_is_what_two_runs_make(place, both):
    """The second one sees by the tower that the first one left, and carries it over byte for byte."""
    source, images = opened(place, "vision")
    rankfold.compress(source, method=VISION, calibration=images, output=place / "seen")
    source, examples = opened(place, "language", "seen")
    rankfold.compress(source, method=LANGUAGE, calibration=examples, output=place / "by-hand")
    dense, seen, expected, got = (weights(place / name) for name in ("dense", "seen", "by-hand", "at-once"))
    assert got.keys() == expected.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    tower = [name for name in got if name.startswith(TOWER)]
    assert tower and all(torch.equal(got[name], seen[name]) for name in tower)
    for name in got.keys() - set(tower):
        assert name.startswith(LAYERS) or torch.equal(got[name], dense[name]), name
    configs = [json.loads((place / name / "config.json").read_text()) for name in ("at-once", "by-hand")]
    modules = [config["quantization_config"]["modules"] for config in configs]
    assert modules[0] == modules[1] and {name.split(".layers.")[0] + ".layers." for name in modules[0]} == {
        TOWER,
        LAYERS,
    }
    source, examples = opened(place, "language")
    rankfold.compress(source, method=LANGUAGE, calibration=examples, output=place / "unseen")
    assert any(not torch.equal(got[name], tensor) for name, tensor in weights(place / "unseen").items() if name in got)


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2


def test_each_part_has_its_own_sparsity_and_the_record_says_both(place, both):
    record = json.loads((both / "rankfold.json").read_text())
    records = {one["plan"]["part"]: one for one in (record["before"], record)}
    dense, small = (weights(place / name) for name in ("dense", "at-once"))
    for part, blocks, asked in (("vision", TOWER, 0.2), ("language", LAYERS, 0.4)):
        left, whole = (
            sum(x.numel() for n, x in state.items() if n.startswith(blocks) and is_matrix(n, x))
            for state in (small, dense)
        )
        counts = records[part]["counts"]
        assert asked <= counts["sparsity"] < asked + 0.08 and counts["sparsity"] == pytest.approx(1 - left / whole)
        assert records[part]["options"]["sparsity"] == asked and records[part]["base_model"] == "dense"
        assert set(records[part]["blocks"]) == set(map(str, range(BLOCKS[part]))) and records[part]["held_out"]
    model = t.AutoModelForImageTextToText.from_pretrained(both)
    assert record["counts"]["parameters"] == model.num_parameters()
    assert record["before"]["plan"]["parameters"] == sum(x.numel() for x in dense.values())
    config = t.AutoConfig.from_pretrained(both).quantization_config
    assert (config["options"]["sparsity"], config["before"]["options"]["sparsity"]) == (0.4, 0.2)


def test_it_sees(place, both):
    processor = t.AutoProcessor.from_pretrained(both)
    model = t.AutoModelForImageTextToText.from_pretrained(both).eval()
    turns = [{"role": "user", "content": [{"type": "image", "image": picture(3)}, {"type": "text", "text": "who?"}]}]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cached, plain = (model.generate(**inputs, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain) and cached.shape[1] == inputs["input_ids"].shape[1] + 4
    with torch.no_grad():
        one, two = (model(**inputs | {"pixel_values": sign * inputs["pixel_values"]}).logits for sign in (1, -1))
    assert not torch.allclose(one[:, -1], two[:, -1])


class Killed(BaseException):
    """As a kill leaves it: nothing after it is done."""


def killed(*args, **kwargs):
    raise Killed


def killed_outside(run, clear=RunFolder._clear_away):
    """When the whole run begins to clear away, not the one of the first part."""
    return killed() if run.before.exists() else clear(run)


@pytest.mark.parametrize("at", ["vision 1", "language", "language 1", "the end"])
def test_a_run_goes_on_where_it_was(place, both, at, monkeypatch):
    """What is done is not done again, and the bytes are the same."""
    output = place / f"killed-at-{at.replace(' ', '-')}"
    done, run = [], rankfold.pipeline.run_stages

    def stop(work, view, ranks):
        name = f"{work.source.part.name} {view.index}"
        if at == name:
            raise Killed
        done.append(name)
        return run(work, view, ranks)

    with monkeypatch.context() as patch:
        patch.setattr(rankfold.pipeline, "run_stages", stop)
        if at == "language":
            patch.setattr("rankfold.components.open_model", killed)
        if at == "the end":
            patch.setattr(RunFolder, "_clear_away", killed_outside)
        with pytest.raises(Killed):
            rankfold.compress_components(given(place), output)
    assert not output.exists() and (output.parent / f"{output.name}.partial").is_dir()
    at = "never"
    monkeypatch.setattr(rankfold.pipeline, "run_stages", stop)
    with pytest.raises(CheckpointError, match="is an unfinished run of another configuration"):
        rankfold.compress_components(given(place, vision=replace(VISION, sparsity=0.3)), output)
    rankfold.compress_components(given(place), output)
    assert sorted(done) == sorted(f"{part} {index}" for part, count in BLOCKS.items() for index in range(count))
    assert comparable(output) == comparable(both)


def comparable(folder: Path) -> dict:
    """Without times and memory, and without the folder's own name."""
    state = read_state(folder)
    record = json.loads(state.pop("rankfold.json"))
    for one in (record, record["before"]):
        del one["run"]
    card = state.pop("README.md").decode().replace(folder.name, "NAME")
    return state | {"record": json.dumps(record).replace(folder.name, "NAME"), "card": card}


def test_planned_is_actual_and_said_before_each_part(place):
    """With ranks by measured effect, which are those of the model that the tower was made smaller in."""
    plans = []
    method = Rankfold(sparsity=0.3, rank_multiple=2)
    folder = rankfold.compress_components(
        given(place, method, method), place / "planned", on_plan=lambda plan, source: plans.append((plan, source))
    ).output
    assert [plan.part for plan, _ in plans] == [source.part.name for _, source in plans] == ["vision", "language"]
    (vision, _), (language, _) = plans
    small = rankfold.load(folder, device="cpu")
    assert language.parameters_after == small.num_parameters() and language.parameters == vision.parameters_after
    assert vision.parameters == tiny_model("llava").num_parameters()
    assert language.kv_bytes_per_token_after <= language.kv_bytes_per_token and vision.kv_bytes_per_token == 0


def test_the_first_part_is_let_go_before_the_second(place):
    """Around the tower lies all of the language model."""
    parts, seen = given(place), []
    seeing = weakref.ref(next(source for source, *_ in parts if source.part.name == "vision"))

    def note(plan, source):
        gc.collect()
        seen.append((plan.part, seeing() is None))

    def passed_on():
        while parts:
            yield parts.pop()

    rankfold.compress_components(passed_on(), place / "let-go", on_plan=note)
    assert seen == [("vision", False), ("language", True)]


def test_towers_of_an_encoder(tmp_path):
    """CLIP has two parts as well, neither of which writes."""
    tiny_encoder("clip-vision").save_pretrained(tmp_path / "clip")
    parts = []
    for name in ("language", "vision"):
        source = rankfold.open_model(tmp_path / "clip", device="cpu", component=name)
        parts.append((source, {"language": LANGUAGE, "vision": VISION}[name], samples_of(source)))
    folder = rankfold.compress_components(parts, tmp_path / "small").output
    modules = t.AutoConfig.from_pretrained(folder).quantization_config["modules"]
    assert {name.split(".")[0] for name in modules} == {"text_model", "vision_model"}
    assert t.AutoModel.from_pretrained(folder).num_parameters() < tiny_encoder("clip-vision").num_parameters()


def test_three_parts_are_what_three_runs_make(place):
    """Each sees by what the ones before it left; the record has one in the other."""
    source, images = opened(place, "projector")
    in_turn = [*given(place), (source, PROJECTOR, images)]
    at_once = rankfold.compress_components(in_turn, place / "three").output
    dense = "dense"
    for name, method in (("vision", VISION), ("projector", PROJECTOR), ("language", LANGUAGE)):
        source, calibration = opened(place, name, dense)
        rankfold.compress(source, method=method, calibration=calibration, output=place / f"to-{name}")
        dense = f"to-{name}"
    expected, got = weights(place / "to-language"), weights(at_once)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    records = records_of(json.loads((at_once / "rankfold.json").read_text()))
    assert [one["plan"]["part"] for one in records] == ["vision", "projector", "language"]
    assert [one["options"]["sparsity"] for one in records] == [0.2, 0.5, 0.4]


def test_what_is_not_two_parts_of_a_model_is_refused(place, tmp_path):
    language, vision = given(place)
    with pytest.raises(
        OptionError,
        match="takes two or more of the components vision, projector, language of a model, got language; open each",
    ):
        rankfold.compress_components([language], tmp_path / "x")
    with pytest.raises(OptionError, match="got vision and vision"):
        rankfold.compress_components([vision, vision], tmp_path / "x")
    other = rankfold.open_model(place / "dense", dtype="bfloat16", device="cpu", component="vision")
    with pytest.raises(
        OptionError, match="components of one model in one dtype, got dense in .* and dense in .*; open the same"
    ):
        rankfold.compress_components([language, (other, *vision[1:])], tmp_path / "x")
    with pytest.raises(OptionError, match="an open model .*, a method and calibration data"):
        rankfold.compress_components([(*language[:2], None), vision], tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_what_stops_the_language_part_is_said_before_the_vision_part_is_compressed(place, tmp_path, monkeypatch):
    monkeypatch.setattr("rankfold.components.compress", None)
    (source, method, examples), vision = given(place)
    for wrong, error, said in (
        ((source, replace(method, sparsity=0.999), examples), OptionError, "sparsity"),
        ((source, method, vision[2]), DataError, "takes token ids, got images; calibrate on text"),
        ((source, replace(method, modules=("vo",), sparsity=0.9), examples), OptionError, "sparsity"),
    ):
        with pytest.raises(error, match=said):
            rankfold.compress_components([wrong, vision], tmp_path / "x")
    assert not list(tmp_path.iterdir())
