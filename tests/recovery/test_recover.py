"""Recovery from end to end, on a model that was trained for a few seconds."""

import json
import math
import re
import shutil
import warnings
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import rankfold
from clocks import set_by_hand
from families import GQA, HEADS_OF_MAMBA, some_ids, tiny_model
from rankfold.cli.recover import parse_minutes
from rankfold.data.probes import Probes, load_probes
from rankfold.errors import CheckpointError, UnsupportedModelError
from rankfold.exports.hub import _results
from rankfold.recovery import training
from rankfold.recovery import whole as module
from rankfold.recovery.compressing import compress_and_recover
from rankfold.recovery.judging import ProbeLosses, allowed, worse_kinds
from rankfold.recovery.opening import device_beside, open_student, open_teacher
from rankfold.recovery.recover import recover
from rankfold.recovery.training import arguments
from rankfold.recovery.tuning import prepared, round_weights, without_dropout
from rankfold.report.model_card import model_card
from rankfold.report.outcomes import recovery_lines
from rankfold.report.record import read_record
from saved import save_tiny
from tiny_encoders import tiny_encoder

STEP = "rankfold.recovery.whole.Distiller.training_step"
METHOD = rankfold.MoDeGPT(sparsity=0.65, rank_multiple=1)
IDS = torch.arange(32 * 64).view(32, 64) * 7919 % 400
OPTIONS = {"tokens": 16384, "max_length": 64, "batch_tokens": 1024, "device": "cpu", "lr": 1e-3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a trained model, two texts and what compressing the model gave.

    Runs of 16 steps are scored after every fourth.
    """
    place = tmp_path_factory.mktemp("recover")
    (place / "manual.txt").write_text("\n\n".join(topics.values())[:200_000], encoding="utf-8")
    (place / "noise.txt").write_text(" ".join(f"{(7919 * i) % 10007:x}" for i in range(40_000)), encoding="utf-8")
    save_tiny(place / "dense", blocks=2)
    model = rankfold.load(place / "dense", device="cpu").train()
    source = rankfold.open_model(place / "dense", device="cpu")
    ids = rankfold.load_calibration(place / "manual.txt", source, num_samples=512, max_length=64).ids
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in ids.split(16) * 3:
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    for file in (place / "dense").glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(place / "dense")
    compress(place, METHOD, "small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORES", 4)
        yield place


@pytest.fixture(scope="module")
def recovered(place):
    """Return what training all weights gave, and the folder with it, which no test may change."""
    (place / "recovered").mkdir()
    output = place / "recovered" / "out"
    return recover(place / "small", place / "dense", calibration=place / "manual.txt", output=output, **OPTIONS)


def compress(place, method, name: str) -> None:
    source = rankfold.open_model(place / "dense", device="cpu")
    tokens = rankfold.load_calibration(place / "manual.txt", source, num_samples=32, max_length=64)
    rankfold.compress(source, method=method, calibration=tokens, output=place / name)


class Killed(BaseException):
    """Nothing catches it."""


def kill(*args, **kwargs):
    raise Killed


def text_of(result) -> dict:
    (facts,) = result.record["recovery"]["held_out"].values()
    return facts


@pytest.mark.parametrize("tune", ["all", "lora", "lora-mlp", "norms"])
def test_it_gains_and_what_is_written_is_what_was_scored(place, recovered, tmp_path, tune):
    before = rankfold.load(place / "small", device="cpu")
    options = {"calibration": place / "manual.txt", "output": tmp_path / "out", "tune": tune, **OPTIONS}
    result = recovered if tune == "all" else recover(place / "small", place / "dense", **options)
    facts = text_of(result)
    assert result.recovered
    assert facts["perplexity_dense"] < facts["perplexity"] < facts["perplexity_before"]
    assert tune == "norms" or facts["ratio"] < 0.975
    written = rankfold.load(result.output, device="cpu")
    assert sum(p.numel() for p in written.parameters()) == sum(p.numel() for p in before.parameters())
    assert {name: p.shape for name, p in written.state_dict().items()} == {
        name: p.shape for name, p in before.state_dict().items()
    }
    source = rankfold.open_model(place / "dense", device="cpu")
    held_out = rankfold.load_calibration(place / "manual.txt", source, num_samples=256, max_length=64).held_out
    assert rankfold.perplexity(written, held_out)["perplexity"] == pytest.approx(facts["perplexity"], rel=1e-4)
    assert rankfold.perplexity(before, held_out)["perplexity"] == pytest.approx(facts["perplexity_before"], rel=1e-4)
    assert [path.name for path in result.output.parent.iterdir()] == ["out"]


def test_a_result_shows_itself_in_a_line(recovered):
    facts = text_of(recovered)
    held_out = f"manual.txt {facts['perplexity_before']:.2f} -> {facts['perplexity']:.2f}"
    assert str(recovered) == repr(recovered)
    assert str(recovered).startswith(f"RecoveryResult(16,384 tokens; held-out perplexity of {held_out}; ")


def test_the_model_in_memory_is_not_changed(place):
    model = rankfold.load(place / "small", device="cpu")
    before = {name: p.clone() for name, p in model.named_parameters()}
    result = recover(model, place / "dense", calibration=place / "manual.txt", **OPTIONS)
    assert result.recovered and result.model is not model
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in result.model.named_parameters())


def test_embeddings_and_head_stay(place, recovered):
    before, after = rankfold.load(place / "small", device="cpu"), recovered.model
    assert torch.equal(before.get_input_embeddings().weight, after.get_input_embeddings().weight)
    assert torch.equal(before.get_output_embeddings().weight, after.get_output_embeddings().weight)


@pytest.mark.parametrize(("tune", "found"), [("lora", 4), ("lora-mlp", 2)])
def test_adapters_are_on_the_linear_layers_that_gpt2_stores_transposed(tune, found):
    """GPT-2 has them where nothing was compressed: in excluded blocks, and in all that a removal of blocks leaves."""
    model = tiny_model("gpt2", blocks=1)
    expected = model(some_ids()).logits
    network = prepared(model, tune, 4, 0)
    adapters = [p for name, p in network.named_parameters() if "lora_B" in name]
    assert len(adapters) == found
    for one in adapters:
        torch.nn.init.normal_(one, std=0.1)
    tuned = network(some_ids()).logits
    assert not torch.allclose(tuned, expected, atol=0.1)
    torch.testing.assert_close(network.merge_and_unload()(some_ids()).logits, tuned, rtol=0, atol=1e-4)


def test_the_last_layer_of_a_mamba_mixer_has_no_adapter():
    """PEFT refuses one in some families: kernels read the weight and pass the adapter by."""
    config = t.FalconH1Config(**GQA, **HEADS_OF_MAMBA, mamba_d_ssm=64)
    network = prepared(t.AutoModelForCausalLM.from_config(config), "lora", 4, 0)
    adapted = {name.rpartition(".lora_A")[0].rpartition("layers.0.")[2] for name, _ in network.named_parameters()}
    assert {"mamba.in_proj", "self_attn.o_proj", "feed_forward.down_proj"} <= adapted
    assert "mamba.out_proj" not in adapted


def test_what_hurts_gives_back_what_went_in(place, tmp_path, caplog):
    """A copy of a folder that nobody may write, too, gets a record and a card of its own."""
    hurt = {**OPTIONS, "lr": 30.0, "tokens": 4096}
    shutil.copytree(place / "small", tmp_path / "small")
    for path in (tmp_path / "small", *(tmp_path / "small").iterdir()):
        path.chmod(path.stat().st_mode & ~0o222)
    result = recover(
        tmp_path / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "out", **hurt
    )
    assert not result.recovered
    assert "NOTHING WAS RECOVERED" in caplog.text
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out", *(tmp_path / "out").iterdir()))
    before, after = (rankfold.load(folder, device="cpu").state_dict() for folder in (place / "small", tmp_path / "out"))
    assert all(torch.equal(after[name], p) for name, p in before.items())


def test_weights_that_went_in_recover_nothing_however_their_scores_are_rounded(place, tmp_path, monkeypatch):
    """Losses of the same weights differ in the last places, so that a few ones seem better."""
    scored, score = [], module.score

    def falling(*args):
        scored.append(args)
        return {name: [loss - 1e-5 * len(scored) for loss in some] for name, some in score(*args).items()}

    monkeypatch.setattr(module, "score", falling)
    options = {**OPTIONS, "lr": 30.0, "tokens": 4096}
    result = recover(
        place / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "out", **options
    )
    facts = result.record["recovery"]
    assert facts["best_step"] == 0 and facts["held_out"]["manual.txt"]["ratio"] < 1
    assert not result.recovered and "do not gain" in facts["unchanged_because"]


@pytest.mark.parametrize("tune", ["all", "lora"])
def test_text_that_costs_all_other_text_gives_back_what_went_in(place, tmp_path, run, tune, caplog):
    command = (
        f"recover small -o {tmp_path / 'out'} --teacher dense --calibration noise.txt --loss next-token --tune {tune} "
        "--lr 0.02 --tokens 16384 --max-length 64 --batch-tokens 1024 --device cpu"
    )
    code, shown, err = run(command)
    assert code == 3, err
    facts = read_record(tmp_path / "out")["recovery"]
    assert not facts["recovered"] and facts["held_out"]["noise.txt"]["ratio"] < 0.9  # the noise itself has gained
    assert re.fullmatch(
        r"of the probe texts, .*prose \(perplexity x [0-9.]+\).* lost more than 25%", facts["unchanged_because"]
    )
    assert facts["unchanged_because"] in shown and "undone" in shown
    assert "NOTHING WAS RECOVERED" in caplog.text
    assert "the model predicts noise.txt no better than guessing" in caplog.text  # the dense one
    before, after = (rankfold.load(folder, device="cpu").state_dict() for folder in (place / "small", tmp_path / "out"))
    assert all(torch.equal(after[name], p) for name, p in before.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "without training" in card and "noise.txt" not in card


def test_a_kind_of_text_is_worse_where_its_loss_is_more_than_chance_explains():
    kinds = {"prose": {"is_known": True}, "dialogue": {"is_known": True}, "web text": {"is_known": False}}
    names = tuple(kind for kind in kinds for _ in range(6))
    probes = Probes(torch.zeros(18, 9, dtype=torch.long), (5,) * 18, names, "plain")
    before = [torch.full((8,), 3.0) for _ in range(18)]
    after = [x + 0.5 for x in before]
    for i in range(
        6, 12
    ):  # as much on average, in one passage out of six; what is after the end of a passage is padding
        after[i] = before[i] + 9.0 * torch.arange(8).ge(4) + (3.0 if i == 6 else 0.0)
    found = worse_kinds(probes, kinds, ProbeLosses(before, before, after), 0.02)
    assert found == {"prose": pytest.approx(math.exp(0.5))}
    assert worse_kinds(probes, kinds, ProbeLosses(before, before, after), 1.0) == {}
    assert worse_kinds(probes, kinds, ProbeLosses(before, before, [x + 0.1 for x in before]), 0.02) == {}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"a": 2.9, "b": 2.0}, True),
        ({"a": 2.9, "b": 2.0 + math.log(1.019)}, True),
        ({"a": 2.9, "b": 2.0 + math.log(1.021)}, False),
        ({"a": 2.999, "b": 2.0 + math.log(1.019)}, False),  # they lose on average
        ({"a": 3.0, "b": 2.0}, False),
        ({"a": 2.9, "b": math.nan}, False),
    ],
)
def test_never_worse(after, expected):
    assert allowed({"a": 3.0, "b": 2.0}, after, 0.02) is expected


def test_zeros_of_a_semi_structured_model_stay(place, tmp_path):
    compress(place, rankfold.make_method("wanda"), "wanda")
    with pytest.raises(rankfold.RankfoldError, match="would fill the zeros .* tune='all'"):
        recover(place / "wanda", place / "dense", calibration=place / "manual.txt", tune="lora", **OPTIONS)
    result = recover(place / "wanda", place / "dense", calibration=place / "manual.txt", tune="all", **OPTIONS)
    assert result.recovered
    before = dict(rankfold.load(place / "wanda", device="cpu").named_parameters())
    for name, p in result.model.named_parameters():
        if "proj" in name:
            assert torch.equal(p == 0, before[name] == 0), name


def test_latents_keep_their_structure(place):
    compress(place, rankfold.LatentLLM(sparsity=0.3), "latent")
    result = recover(place / "latent", place / "dense", calibration=place / "manual.txt", **OPTIONS)
    before = rankfold.load(place / "latent", device="cpu")
    assert result.recovered
    assert {n: b.shape for n, b in result.model.state_dict().items()} == {
        n: b.shape for n, b in before.state_dict().items()
    }
    for name, buffer in result.model.named_buffers():  # orders, pairs
        assert torch.equal(buffer, dict(before.named_buffers())[name]), name


def test_quantised_factors_are_refused(place):
    compress(place, rankfold.LatentLLM(sparsity=0.3, bits=4), "bits")
    with pytest.raises(
        rankfold.RankfoldError, match="quantised factors, which cannot be trained; compress it without bits"
    ):
        recover(place / "bits", place / "dense", calibration=place / "manual.txt", **OPTIONS)


def test_encoders_are_refused_with_any_head(subtests):
    for name in ("bert-head", "modernbert-head", "vit-head"):
        model = tiny_encoder(name)
        with subtests.test(name), pytest.raises(UnsupportedModelError, match="predicts no next token"):
            recover(model, model, calibration=some_ids(16, 32), **OPTIONS)


def test_experts_without_a_linear_layer_take_no_adapters():
    model = tiny_model("mixtral", blocks=1)
    with pytest.raises(UnsupportedModelError, match="stacked weights of experts take none"):
        prepared(model, "lora-mlp", rank=2, seed=0)


def test_an_adapter_computes_what_the_merged_model_computes(place, tmp_path):
    from peft import PeftModel

    options = {**OPTIONS, "tune": "lora", "calibration": place / "manual.txt"}
    recover(place / "small", place / "dense", output=tmp_path / "adapter", adapter=True, **options)
    merged = recover(place / "small", place / "dense", **options).model
    adapted = PeftModel.from_pretrained(rankfold.load(place / "small", device="cpu"), tmp_path / "adapter").eval()
    ids = torch.arange(40)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_begin_alike_whatever_was_drawn_before(place):
    begun = []
    for drawn in range(2):
        torch.manual_seed(drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # nobody can do anything about PEFT's
            network = prepared(rankfold.load(place / "small", device="cpu"), "lora", 4, 0)
        begun.append(torch.cat([p.flatten() for name, p in network.named_parameters() if "lora_A" in name]))
        assert torch.initial_seed() == drawn
    assert torch.equal(*begun) and begun[0].count_nonzero()


def test_texts_may_be_in_memory(place):
    texts = (place / "manual.txt").read_text(encoding="utf-8").split("\n\n")
    source = rankfold.open_model(place / "dense", device="cpu")
    ways = (texts, rankfold.load_calibration(texts, source, num_samples=256, max_length=64))
    for calibration in ways:
        found = recover(place / "small", place / "dense", calibration=calibration, **OPTIONS | {"tokens": 4096})
        (name,) = found.record["recovery"]["held_out"]
        assert found.recovered and name == "list" and found.record["recovery"]["calibration"] == {"list": 1.0}


@pytest.mark.parametrize(
    ("calibration", "said"),
    [
        ([torch.arange(40), torch.arange(50)], "sequences of one length, and 'list' holds sequences"),
        (IDS[:1], "'Tensor' has a single sequence"),
        (3, "calibration data is .*; got int"),
        ({"manual.txt": 0}, "share of calibration text 'manual.txt' must be a number above 0"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(calibration, said, place):
    with pytest.raises(rankfold.RankfoldError, match=said):
        recover(place / "small", place / "dense", calibration=calibration, **OPTIONS)


def test_a_killed_run_ends_in_the_same_weights(place, recovered, tmp_path, monkeypatch):
    wait, plain = set_by_hand(monkeypatch, training, "monotonic"), module.Distiller.training_step

    def step(*args, **kwargs):
        wait(1.0)
        return plain(*args, **kwargs)

    monkeypatch.setattr(module.Distiller, "training_step", step)
    for stop in (3, 7, 5, 1, 2):  # steps of a process until it is killed
        calls = iter(range(stop))

        def killed(self, *args, calls=calls, **kwargs):
            if next(calls, None) is None:
                raise Killed
            return step(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module.Distiller, "training_step", killed)
            recover(
                place / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "again", **OPTIONS
            )
        assert not (tmp_path / "again").exists()
    resumed = recover(
        place / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "again", **OPTIONS
    )
    assert resumed.record["recovery"]["history"] == recovered.record["recovery"]["history"]
    assert resumed.record["recovery"]["seconds"] == 16.0, "of all steps, whichever process took them"
    folders = (tmp_path / "again", recovered.output)
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_a_damaged_checkpoint_of_an_unfinished_run_is_one_line(place, tmp_path, monkeypatch, subtests):
    given = {"calibration": place / "manual.txt", "output": tmp_path / "out", **OPTIONS}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module.Judge, "restore_best", kill)
        recover(place / "small", place / "dense", **given)
    (checkpoint,) = (tmp_path / "out.partial").glob("checkpoint-*")
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        with subtests.test(name):
            content = (checkpoint / name).read_bytes()
            (checkpoint / name).write_bytes(content[: len(content) // 2])
            with pytest.raises(CheckpointError, match=f"{name} is missing or damaged; remove .*{checkpoint.name}, and"):
                recover(place / "small", place / "dense", **given)
            (checkpoint / name).write_bytes(content)
    (tmp_path / "out.partial" / "best.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"best.safetensors is damaged .*; remove .*out.partial and start again"):
        recover(place / "small", place / "dense", **given)


def test_what_a_kill_leaves_of_a_finished_run_is_not_gone_on_with(place, tmp_path, monkeypatch):
    given = {"calibration": place / "manual.txt", "output": tmp_path / "out", **OPTIONS, "tokens": 1024}
    remove = shutil.rmtree
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(
            shutil, "rmtree", lambda path, **k: (kill if Path(path).suffix == ".partial" else remove)(path, **k)
        )
        recover(place / "small", place / "dense", **given)
    (tmp_path / "out").rename(tmp_path / "kept")
    (tmp_path / "out.partial" / "best.safetensors").unlink()
    with pytest.raises(rankfold.RankfoldError, match=r"out.partial exists and is not an unfinished run; remove it"):
        recover(place / "small", place / "dense", **given)


def test_an_unfinished_run_of_other_options_is_refused(place, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "run.json").write_text(json.dumps({"tune": "lora"}))
    with pytest.raises(
        rankfold.RankfoldError, match=r"unfinished run of another configuration \(its tune is lora, not all\)"
    ):
        recover(place / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "out", **OPTIONS)


def test_an_unfinished_run_of_another_model_or_time_is_refused(place, tmp_path, monkeypatch):
    given = {"teacher": place / "dense", "calibration": place / "manual.txt", "output": tmp_path / "out"} | OPTIONS
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(STEP, kill)
        recover(place / "small", **given)
    other = rankfold.load(place / "small", device="cpu")
    other.model.norm.weight.data[0] += 1
    with pytest.raises(rankfold.RankfoldError, match=r"another configuration \(its model is [0-9a-f]{32}, not"):
        recover(other, **given)
    with pytest.raises(rankfold.RankfoldError, match=r"another configuration \(its minutes is None, not 5"):
        recover(place / "small", minutes=5, **given)


def test_a_second_training_keeps_what_is_known_of_the_first(place, recovered, tmp_path, run):
    found = recover(recovered.output, place / "dense", calibration="pydoc", output=tmp_path / "out", **OPTIONS)
    assert found.record["recovery"]["earlier"] == recovered.record["recovery"]
    texts = [rankfold.load(folder, device="cpu").config.quantization_config.fields["trained_on"] for folder in
             (recovered.output, found.output)]  # fmt: skip
    assert found.recovered and len(texts[0]) == 1 and texts[1] == [*texts[0], "pydoc"]
    card, trained = (found.output / "README.md").read_text(), "16,384 tokens of {} towards the predictions of dense"
    first, second = (trained.format(text) for text in ("manual.txt", "pydoc"))
    assert re.search(f", then [^,]+,[^,]+ {first}, then [^,]+,[^,]+ {second}\\.\n", card)
    assert "\n# then 2 trainings, with the options in rankfold.json\n" in card and "rankfold recover" not in card
    # Each with the probe texts as it found and left them.
    lines = [*recovery_lines(recovered.record), *recovery_lines(found.record)[-len(recovery_lines(recovered.record)) :]]
    assert recovery_lines(found.record) == lines and run(f"inspect {found.output}")[1].endswith("\n".join([*lines, ""]))
    assert lines[0].endswith(first) and any(line.startswith("prose: ") for line in lines)


def test_what_trainer_logs_stays(place, tmp_path, monkeypatch):
    step = module.Distiller.training_step

    def logged(self, *args, **kwargs):
        runs = Path(self.args.output_dir) / "runs"
        runs.mkdir(exist_ok=True)
        (runs / "events").touch()
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.Distiller, "training_step", logged)
    given = {"calibration": place / "manual.txt", "output": tmp_path / "out"}
    recover(place / "small", place / "dense", **{**OPTIONS, **given, "tokens": 4096})
    assert (tmp_path / "out" / "runs" / "events").exists() and not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_an_error_of_one_line(place, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankfold._utils.files.save_file", full)
    with pytest.raises(rankfold.RankfoldError, match=r"cannot write .*best.safetensors: No space left on device"):
        recover(place / "small", place / "dense", calibration=place / "manual.txt", output=tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"seed": -1}, r"a seed from 0 to 2\*\*32 - 1, got -1"),
        ({"minutes": 0}, "minutes must be more than 0 and finite, got 0"),
        ({"minutes": math.inf}, "minutes must be more than 0 and finite, got inf"),
        ({"lr": math.nan}, "lr must be more than 0 and finite, got nan"),
        ({"tolerance": math.inf}, "tolerance must be at least 0 and finite, got inf"),
        ({"output": "new", "cache_logits": "new/cache"}, "cache_logits new/cache and output new are one folder, or"),
        ({"adapter": True}, "adapter=True writes the adapters of tune='lora'"),
        ({"loss": "mse"}, "loss must be one of 'kl', 'next-token', 'both', got 'mse'"),
        ({"tune": "head"}, "tune must be one of 'lora', 'lora-mlp', 'all', 'norms', got 'head'"),
    ],
)
def test_options_out_of_range_are_refused(place, options, message):
    with pytest.raises(rankfold.RankfoldError, match=message):
        recover(place / "small", place / "dense", calibration=place / "manual.txt", **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens 0", "--tokens must be at least 1, got 0"),
        ("--lr -1", "--lr must be more than 0 and finite, got -1.0"),
        ("--adapter", "--adapter writes the adapters of --tune lora or --tune lora-mlp to --output; give both"),
        ("--report-to nowhere", "--report-to must be one of none, all"),
    ],
)
def test_a_command_is_refused_in_its_own_words(place, run, options, message):
    code, _, err = run(f"recover small -o refused --teacher dense --calibration manual.txt --device cpu {options}")
    assert code == 2 and message in err


def test_a_teacher_with_another_vocabulary_is_refused(place, tmp_path):
    save_tiny(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    other = rankfold.load(tmp_path / "other", device="cpu")
    other.resize_token_embeddings(config["vocab_size"] + 8)
    with pytest.raises(rankfold.RankfoldError, match="the teacher has 408 tokens and the model 400"):
        recover(place / "small", other, calibration=place / "manual.txt", **OPTIONS)


def test_a_teacher_with_another_tokenizer_is_refused_and_one_with_another_name_of_a_token_is_not(place, tmp_path):
    facts = json.loads((place / "dense" / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    shifted = {token: (number + 1) % len(vocabulary) for token, number in vocabulary.items()}
    renamed = {"new" if token == max(vocabulary) else token: number for token, number in vocabulary.items()}
    for name, tokens in (("shifted", shifted), ("renamed", renamed)):
        shutil.copytree(place / "dense", tmp_path / name)
        model = facts["model"] | {"vocab": tokens, "merges": []}
        changed = facts | {"model": model, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(changed))
    how = {"calibration": IDS % 400, **OPTIONS, "tokens": 1024}
    with pytest.raises(
        rankfold.RankfoldError, match="another tokenizer than the model: token .* is .* there and .*here"
    ):
        recover(place / "small", tmp_path / "shifted", **how)
    recover(place / "small", tmp_path / "renamed", **how)


def test_a_dense_model_elsewhere_is_refused_and_one_in_memory_says_where_to_train(place):
    given = open_student(place / "small", "cpu")
    elsewhere = rankfold.open_model(place / "dense", device="cpu")
    elsewhere.model.to("meta")
    with pytest.raises(rankfold.RankfoldError, match="the dense model is on meta and the compressed one on cpu; move"):
        open_teacher(elsewhere, given)
    assert device_beside(elsewhere, "auto") == device_beside(elsewhere.model, "auto") == "meta"
    assert device_beside(elsewhere, "cpu") == "cpu" and device_beside("dense", "auto") == "auto"


def test_an_encoder_is_refused_as_the_teacher(place):
    config = t.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=400)
    with pytest.raises(rankfold.RankfoldError, match="BertForMaskedLM is an encoder"):
        recover(place / "small", t.BertForMaskedLM(config), calibration=IDS, **OPTIONS)


def test_models_that_predict_no_numbers_are_refused(place, tmp_path, subtests):
    for what, folder in (("dense", "dense"), ("compressed", "small")):
        models = {"small": place / "small", "dense": place / "dense", folder: tmp_path / folder}
        shutil.copytree(place / folder, tmp_path / folder)
        file = min((tmp_path / folder).glob("*.safetensors"))  # of a compressed model, block 0
        weights = load_file(file)
        next(weights[name] for name in weights if "up_proj" in name)[0] = torch.nan
        save_file(weights, file, metadata={"format": "pt"})
        for options in ({}, {"blockwise": True}):
            how = OPTIONS | {"tokens": 2048, "output": tmp_path / f"{what}-{len(options)}"} | options
            with subtests.test(what, **options), pytest.raises(rankfold.RankfoldError, match="NaN or infinite"):
                recover(*models.values(), calibration=place / "manual.txt", **how)


class Trial:
    """A step that takes ten milliseconds, in two batches, by a clock that it moves on itself."""

    args = SimpleNamespace(gradient_accumulation_steps=2)

    def __init__(self, wait):
        self.wait = wait

    def get_train_dataloader(self):
        return [None] * 9

    def compute_loss(self, network, batch):
        self.wait(0.005)
        return network.weight.sum()


@pytest.mark.parametrize(("scoring", "scores", "steps"), [(0.01, 10, 188), (0.1, 4, 140), (9.0, 1, 1)])
def test_scoring_takes_a_fifth_of_the_time_at_most_and_training_the_rest(tmp_path, monkeypatch, scoring, scores, steps):
    network, trial = torch.nn.Linear(1, 1), Trial(set_by_hand(monkeypatch, module, "monotonic"))
    monkeypatch.setattr(module, "SCORES", 10)
    found = module._fitting(2.0, scoring, tmp_path, network, trial)
    assert found == (scores, pytest.approx(steps, abs=1)) and network.weight.grad is None
    assert module._fitting(99.0, scoring, tmp_path, network, trial) == found  # as it was written down


@pytest.mark.parametrize(("steps", "rising"), [(1, 0), (2, 1), (6, 3), (24, 3), (80, 4), (244, 12), (1000, 50)])
def test_the_learning_rate_rises_over_three_steps_at_least_or_half_of_the_run(tmp_path, steps, rising):
    found = arguments(tmp_path, steps=steps, batch=1, length=8, every=1, device=torch.device("cpu"), keep=False)
    assert found.warmup_steps == rising


def test_held_out_text_is_scored_no_more_often_than_planned(place):
    """Seven steps cannot be cut into four equal parts: the last one is shorter."""
    result = recover(
        place / "small", place / "dense", calibration=place / "manual.txt", **OPTIONS | {"tokens": 7 * 1024}
    )
    assert [one["step"] for one in result.record["recovery"]["history"]] == [0, 2, 4, 6, 7]


def test_minutes_bound_the_tokens(place):
    result = recover(place / "small", place / "dense", calibration=place / "manual.txt", minutes=0.001, **OPTIONS)
    facts = result.record["recovery"]
    assert facts["tokens_seen"] < OPTIONS["tokens"]
    assert facts["tokens"] == 1024 * facts["steps"]  # which `--config` asks for


def test_tokens_seen_are_those_of_every_forward(place, monkeypatch):
    """Steps are of 16 sequences, and an epoch ends with one of fewer."""
    seen, whole = [], module.Distiller.compute_loss

    def counted(self, model, inputs, *args, **options):
        seen.append(inputs["input_ids"].numel())
        return whole(self, model, inputs, *args, **options)

    monkeypatch.setattr(module.Distiller, "compute_loss", counted)
    text = " ".join(topics.values())[:4000]
    (place / "short.txt").write_text(text, encoding="utf-8")
    result = recover(place / "small", place / "dense", calibration=place / "short.txt", **OPTIONS | {"tokens": 5000})
    facts = result.record["recovery"]
    assert facts["tokens_seen"] == sum(seen) < 1024 * facts["steps"]


def test_a_local_dense_model_has_to_be_named(place):
    with pytest.raises(
        rankfold.RankfoldError, match="the dense model 'dense' was a local one; give its path as teacher"
    ):
        recover(place / "small", calibration=place / "manual.txt", **OPTIONS)


def test_what_compress_returned_knows_its_teacher_and_is_not_changed(place, tmp_path, run, caplog):
    small = rankfold.compress(place / "dense", method=METHOD, calibration=IDS, device="cpu")
    before = {name: p.clone() for name, p in small.model.named_parameters()}
    result = recover(small, calibration=place / "manual.txt", output=tmp_path / "out", **OPTIONS)
    code, *_ = run(f"evaluate {tmp_path / 'out'} --text manual.txt --max-length 64 --limit 2 --device cpu")
    assert code in (0, None) and "trained on this very text (manual.txt)" in caplog.text
    assert result.recovered and "recovery" not in small.record
    assert result.record["base_model"] == small.record["base_model"] == "dense"
    assert all(torch.equal(p, before[name]) for name, p in small.model.named_parameters())
    named = recover(small.model, place / "dense", calibration=place / "manual.txt", **OPTIONS)
    assert text_of(named) == text_of(result)


def test_dropout_is_as_it_was_after_training(place):
    model = rankfold.load(place / "small", device="cpu")
    for one in model.modules():
        if hasattr(one, "attention_dropout"):
            one.attention_dropout = 0.25
    with without_dropout(model):
        assert dropouts(model) == {0.0}
    result = recover(model, place / "dense", calibration=place / "manual.txt", **{**OPTIONS, "tokens": 2048})
    assert dropouts(model) == dropouts(result.model) == {0.25}


@pytest.mark.parametrize(("tune", "output"), [("all", "out"), ("lora", None)])
def test_a_trained_model_is_as_any_other_but_for_its_weights(place, tmp_path, tune, output):
    """Trainer turns the cache off, has activations computed twice for good, and embeddings ask for a gradient."""
    few = {**OPTIONS, "tokens": 2048, "tune": tune, "gradient_checkpointing": True}
    few |= {"output": output and tmp_path / output}
    model = recover(place / "small", place / "dense", calibration=place / "manual.txt", **few).model
    fresh = rankfold.load(place / "small", device="cpu")
    ours, theirs = (
        {name: value for name, value in one.config.to_dict().items() if name != "quantization_config"}
        for one in (model, fresh)
    )
    assert ours == theirs and ours["use_cache"]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not model.get_input_embeddings()._forward_hooks
    assert all(parameter.requires_grad for parameter in model.parameters())
    if output:
        written = json.loads((tmp_path / output / "config.json").read_text())
        before = json.loads((place / "small" / "config.json").read_text())
        assert written.pop("quantization_config") and before.pop("quantization_config")
        assert written == before


def dropouts(model) -> set[float]:
    return {module.attention_dropout for module in model.modules() if hasattr(module, "attention_dropout")}


def test_card_and_inspect_say_what_was_trained(recovered, tmp_path, run):
    shutil.copytree(recovered.output, tmp_path / "out")
    facts = text_of(recovered)
    card = (tmp_path / "out" / "README.md").read_text()
    trained = "(all) trained on 16,384 tokens of manual.txt towards the predictions of dense"
    dense, before, after = (f"{facts[key]:.2f}" for key in ("perplexity_dense", "perplexity_before", "perplexity"))
    assert trained in card and "without training" not in card
    assert f"| perplexity, manual.txt | {dense} | {after} | {before} before training, on 8 held-out sequences" in card
    lines = ("compress dense --config out/rankfold.json -o out-again",
             "recover out-again --teacher dense --config out/rankfold.json -o out-recovered")  # fmt: skip
    assert "".join(f"\nrankfold {line}" for line in lines) + "\n" in card
    code, shown, _ = run(f"inspect {tmp_path / 'out'}")
    assert code in (0, None) and trained in shown and "\n  perplexity before training " in shown
    assert f"manual.txt: perplexity {before} -> {after} (dense {dense}) on 8 held-out sequences" in shown
    record = json.loads((tmp_path / "out" / "rankfold.json").read_text())
    record["recovery"]["held_out"]["manual.txt"]["perplexity"] = "low"
    (tmp_path / "out" / "rankfold.json").write_text(json.dumps(record))
    with pytest.raises(rankfold.RankfoldError, match=r"recovery.held_out.manual.txt.perplexity should be a number"):
        read_record(tmp_path / "out")


def test_a_training_that_is_undone_leaves_what_is_said_of_the_one_before(place, recovered, tmp_path, run):
    hurt = {**OPTIONS, "lr": 30.0, "tokens": 1024}
    undone = recover(recovered.output, place / "dense", calibration="pydoc", output=tmp_path / "out", **hurt)
    assert not undone.recovered
    earlier, card = (folder / "README.md" for folder in (recovered.output, undone.output))
    said = (line for line in earlier.read_text().splitlines() if line.startswith(("|", "dense, compressed by")))
    text = card.read_text()
    assert all(line in text for line in said) and "without training" not in text
    assert "rankfold recover" not in text, "the options of the record are those of the second training"
    _, shown, _ = run(f"inspect {undone.output}")
    assert "\n  perplexity before training " in shown
    lines = [*recovery_lines(recovered.record), *recovery_lines(undone.record)[-2:]]
    assert shown.endswith("\n".join(["", *lines, ""])) and "; nothing was recovered (" in lines[-2]
    assert _results(undone.record) == _results(recovered.record) != []


def test_probe_texts_are_those_of_the_trained_weights(place, recovered, run):
    before, out = read_record(place / "small")["probe_texts"], recovered.output
    record = read_record(out)
    assert record["recovery"]["probe_texts_before"] == before
    described = rankfold.load(out, device="cpu").config.quantization_config.fields
    assert described["probe_texts"] == record["probe_texts"] != before
    probes = load_probes(rankfold.open_model(place / "dense", device="cpu"))
    models = {
        "perplexity": rankfold.load(out, device="cpu"),
        "perplexity_dense": rankfold.load(place / "dense", device="cpu"),
    }
    assert record["probe_texts"]["kinds"].keys() == before["kinds"].keys()
    for (kind, facts), (key, model) in product(record["probe_texts"]["kinds"].items(), models.items()):
        passages = zip(probes.ids, probes.lengths, probes.kinds, strict=True)
        rows = [ids[:length][None] for ids, length, of in passages if of == kind]
        nats = sum(model(input_ids=row, labels=row).loss.item() * (row.numel() - 1) for row in rows)
        expected = math.exp(nats / sum(row.numel() - 1 for row in rows))
        assert facts[key] == pytest.approx(expected, rel=1e-4), (kind, key)
    assert record["probe_texts"]["kinds"]["prose"]["perplexity"] != before["kinds"]["prose"]["perplexity"]
    card, (_, shown, _) = (out / "README.md").read_text(), run(f"inspect {out}")
    assert "| perplexity, prose |" in card and "| perplexity before training |" in card
    assert "\n  perplexity before training " in shown and re.search(r"\n    prose +[0-9]", shown)
    for kind, facts in record["probe_texts"]["kinds"].items():
        was = before["kinds"][kind]["perplexity"]
        line = f"{kind}: perplexity {was:.2f} -> {facts['perplexity']:.2f} (dense {facts['perplexity_dense']:.2f}) on "
        assert f"\n{line}1 probe text\n" in f"{shown}\n"


def test_probe_texts_of_an_earlier_recovery_are_those_before_training(recovered, tmp_path, run):
    shutil.copytree(recovered.output, tmp_path / "out")
    path = tmp_path / "out" / "rankfold.json"
    record = json.loads(path.read_text())
    del record["recovery"]["probe_texts_before"]
    record["probe_texts"]["warning"] = record["held_out"]["warning"] = "IT IS BAD"
    path.write_text(json.dumps(record))
    card, (_, shown, _) = model_card(read_record(path), "out"), run(f"inspect {tmp_path / 'out'}")
    assert "| perplexity before training, prose |" in card and card.count("**before training: IT IS BAD.**") == 2
    assert "\n    prose before training " in shown and shown.count("before training: IT IS BAD") == 2


def test_a_model_that_rankfold_did_not_compress_has_no_run_record(place, tmp_path):
    model = rankfold.load(place / "small", device="cpu")
    recover(model, place / "dense", calibration=place / "manual.txt", output=tmp_path / "out", **OPTIONS)
    with pytest.raises(rankfold.RankfoldError, match=r"has no rankfold.json"):
        read_record(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "recovery.json").read_text())["recovery"]["recovered"]


COMPRESS = (
    "compress dense --method modegpt --sparsity 0.65 --rank-multiple 1 --calibration manual.txt --num-samples 16 "
    "--max-length 64 --device cpu --recover"
)


def test_compress_recovers_and_a_killed_run_goes_on_in_either_half(place, run, monkeypatch):
    monkeypatch.setattr("rankfold.recovery.whole._fitting", lambda *args: (10, 10))  # however busy the machine is
    kills = {"rankfold.pipeline.CompressionRun.finish": "both.compressed.partial", STEP: "both.compressed"}
    for killed, left in kills.items():
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(killed, kill)
            run(f"{COMPRESS} 2s -o both")
        assert (place / left).exists() and not (place / "both").exists()
    with monkeypatch.context() as patch:
        patch.setattr("rankfold.pipeline.compress", kill)  # it is done
        code, shown, err = run(f"{COMPRESS} 2s -o both")
    assert code in (0, None), err
    assert "tokens of manual.txt towards the predictions of dense" in shown and "manual.txt: perplexity" in shown
    assert [path.name for path in place.glob("both*")] == ["both"]
    record = read_record(place / "both")
    assert record["method"] == "modegpt" and record["recovery"]["recovered"]
    assert "# both\n" in (place / "both" / "README.md").read_text()


def test_what_is_compressed_on_moments_recovers_too(place, monkeypatch):
    monkeypatch.setattr("rankfold.recovery.whole._fitting", lambda *args: (10, 10))
    source = rankfold.open_model(place / "dense", device="cpu")
    data = rankfold.load_calibration(place / "manual.txt", source, num_samples=16, max_length=64)
    moments = rankfold.calibrate(source, data, place / "moments")
    method = rankfold.make_method("modegpt", sparsity=0.65, rank_multiple=1)
    texts = {str(place / "manual.txt"): 1.0}
    compress_and_recover(
        source, method, None, place / "of_moments", minutes=1 / 30, texts=texts, moments=moments, mode="one-pass"
    )
    record = read_record(place / "of_moments")
    assert record["mode"] == "one-pass" and record["recovery"]["recovered"]
    assert record["calibration"] == moments.identity["tokens"]


@pytest.mark.parametrize(("given", "minutes"), [("90s", 1.5), ("15min", 15), ("1.5h", 90), ("2 min", 2)])
def test_times_of_a_recovery(given, minutes):
    assert parse_minutes(given) == minutes


def test_what_cannot_be_trained_is_not_compressed_first(place, run):
    code, _, err = run(f"{COMPRESS} 5s -o never --seed -1")
    assert code == 2 and "training takes a seed from 0 to 2**32 - 1, got -1" in err
    assert not list(place.glob("never*"))


def test_a_time_that_is_none_is_refused_and_so_is_what_cannot_be_trained(place, run):
    for given in ("15", "0min", "-1h", "soon"):
        code, _, err = run(f"{COMPRESS} {given} -o never")
        assert code == 2 and "--recover takes a time such as 90s, 15min or 1.5h; got" in err
    code, _, err = run(
        "compress dense --method latentllm --set bits=4 --calibration manual.txt --recover 1min -o never"
    )
    assert code == 2 and "cannot be trained: it predicts no tokens, or has quantised factors" in err


def test_steps_below_half_a_unit_in_the_last_place_are_not_lost():
    layer = torch.nn.Linear(256, 256)
    start = layer.weight.data.bfloat16().float()
    layer.weight.data = start + 0.1 * start.abs() / 256  # at most a fifth of half a unit: the nearest is where it was
    assert torch.equal(layer.weight.data.bfloat16().float(), start)
    round_weights(layer, torch.bfloat16, seed=0)
    assert torch.equal(layer.weight.data, layer.weight.data.bfloat16().float())
    assert 0.97 < (layer.weight.data - start).sum() / (0.1 * start.abs() / 256).sum() < 1.03
