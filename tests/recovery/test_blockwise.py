"""Recovery block by block: towards the dense states, with what a method left of a block as it is, and never worse."""

import pytest
import torch
import transformers

import rankfold
from allocations import peak_bytes
from clocks import set_by_hand
from families import GQA, some_ids, tiny_model, tokens
from rankfold.checkpoint.streamed import open_streamed
from rankfold.data.calibration_data import CalibrationData
from rankfold.recovery import training
from rankfold.recovery.blockwise import Blockwise, kept_of
from rankfold.recovery.options import Options
from rankfold.recovery.recover import recover
from rankfold.report.record import read_record

TEXTS = {"some": CalibrationData(some_ids(16, 32, seed=1), "some", "some", 0, held_out=some_ids(2, 32, seed=2))}
OPTIONS = Options("all", "kl", 4096, 16, 3e-3, 256, 32, 0.02, 0, "text")
WHAT = ["attention", "mlp"]


def blockwise(small, dense, work, texts=TEXTS, **options) -> Blockwise:
    """Return a recovery of a folder that nothing has trained yet."""
    student = open_streamed(small, dtype="float32", device="cpu")
    source = rankfold.open_model(dense, device="cpu")
    student.autocast = source.autocast = None
    kept = kept_of(student, source, read_record(small))
    options = Options(**{**vars(OPTIONS), **options})
    work.mkdir(exist_ok=True)
    return Blockwise(student, source, kept, texts, None, options, written=torch.float32, work=work)


@pytest.mark.parametrize(
    ("width", "hidden", "sequences", "batch", "tune", "vocabulary"),
    [
        (128, 1024, 8, 128, "all", 128),
        (64, 128, 32, 1024, "all", 128),
        (64, 256, 16, 512, "norms", 128),
        (128, 256, 8, 128, "all", 16384),
    ],
    ids=["weights", "activations", "norms", "tied embeddings"],
)
def test_the_estimate_of_memory_is_what_is_taken(width, hidden, sequences, batch, tune, vocabulary, tmp_path):
    shape = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": 2, "vocab_size": vocabulary}
    shape |= {"tie_word_embeddings": vocabulary > 128}
    config = transformers.LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    text = CalibrationData(some_ids(16, 32), "some", "some", 0, held_out=some_ids(2, 32, seed=1))
    rankfold.compress(
        rankfold.open_model(tmp_path / "dense", device="cpu"),
        method=rankfold.MoDeGPT(sparsity=0.3),
        calibration=text,
        output=tmp_path / "small",
    )
    texts = {"some": CalibrationData(some_ids(sequences, 64), "some", "some", 0, held_out=some_ids(4, 64, seed=1))}
    options = {"tune": tune, "batch_tokens": batch, "length": 64, "tokens": 64 * sequences, "lr": 1e-4}
    found = []

    def run():
        found.append(blockwise(tmp_path / "small", tmp_path / "dense", tmp_path / "work", texts, **options))
        found[0].train()

    peak = peak_bytes(run)
    assert 0.9 * peak <= found[0].memory_bytes <= 1.3 * peak


@torch.no_grad()
def states(model, ids) -> list[torch.Tensor]:
    """Return what every block of a model sends."""
    found = []

    def note(module, args, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_hook(note) for block in model.get_decoder().layers]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("family", "method", "trained"),
    [
        ("llama", rankfold.make_method("modegpt", sparsity=0.4, rank_multiple=1), WHAT),
        ("phi", rankfold.make_method("modegpt", sparsity=0.4, rank_multiple=1), ["block"]),
        ("opt", rankfold.LatentLLM(sparsity=0.4), WHAT),
        ("mixtral", rankfold.make_method("rankfold", sparsity=0.4, rank_multiple=1, allocation="uniform"), WHAT),
        ("llama", rankfold.make_method("wanda"), WHAT),
        ("llama", rankfold.make_method("sleb", sparsity=0.5), WHAT),
    ],
    ids=["llama", "parallel", "latents", "experts", "zeros", "removed-blocks"],
)
def test_blocks_come_nearer_to_those_of_the_dense_model(family, method, trained, tmp_path):
    dense, small = tiny_model(family), tmp_path / "small"
    rankfold.compress(dense, method=method, calibration=tokens(), output=small, device="cpu")
    run = blockwise(small, dense, tmp_path / "work")
    of_dense, before, after, facts = run.train()
    run.cast()
    run.write(tmp_path / "out")
    untrained, written = (rankfold.load(folder, device="cpu") for folder in (small, tmp_path / "out"))
    assert {n: t.shape for n, t in written.state_dict().items()} == {
        n: t.shape for n, t in untrained.state_dict().items()
    }
    for name, t in untrained.state_dict().items():  # zeros and identities of the form; embeddings and head
        if "wanda" in method.name and t.dim() == 2 and (t == 0).float().mean() > 0.4:
            assert torch.equal(written.state_dict()[name] == 0, t == 0), name
    assert torch.equal(written.get_output_embeddings().weight, untrained.get_output_embeddings().weight)
    assert facts["blocks"]["0"]["trained"] == trained

    held_out = TEXTS["some"].held_out
    first = states(dense, held_out)[
        [*run.kept, 3][1] - 1
    ]  # of three blocks; one that is left stands for those removed after it, too
    for model, key in ((untrained, "error_before"), (written, "error")):
        expected = ((states(model, held_out)[0] - first).square().sum() / first.square().sum()).item()
        assert facts["blocks"]["0"][key]["some"] == pytest.approx(expected, rel=1e-3)
    assert all(block["error"]["some"] <= block["error_before"]["some"] for block in facts["blocks"].values())
    assert facts["blocks"]["0"]["error"]["some"] < 0.99 * facts["blocks"]["0"]["error_before"]["some"]
    for model, losses in ((dense, of_dense), (untrained, before), (written, after)):
        loss = model(held_out, labels=held_out).loss.item()
        assert torch.cat(losses["some"]).mean().item() == pytest.approx(loss, rel=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a compressed tiny model in a folder."""
    folder = tmp_path_factory.mktemp("blockwise") / "small"
    method = rankfold.make_method("modegpt", sparsity=0.4, rank_multiple=1)
    rankfold.compress(tiny_model("llama"), method=method, calibration=tokens(), output=folder, device="cpu")
    return folder


def test_a_killed_run_ends_in_the_same_weights(small, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    whole = blockwise(small, tiny_model("llama"), tmp_path / "whole")
    expected = whole.train()
    whole.write(tmp_path / "whole-out")
    steps = iter(range(9))
    fit = Blockwise._fit

    wait = set_by_hand(monkeypatch, training, "monotonic")

    def killed(self, *args):
        if next(steps) in (1, 4):  # between the halves of the first block, and in the second
            raise Killed
        wait(1.0)
        fit(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Blockwise, "_fit", killed)
        for _ in range(2):
            with pytest.raises(Killed):
                blockwise(small, tiny_model("llama"), tmp_path / "again").train()
    again = blockwise(small, tiny_model("llama"), tmp_path / "again")
    found = again.train()
    again.write(tmp_path / "again-out")
    assert found[3] == expected[3]
    assert again.clock.seconds == 2.0, "of what was kept: the halves of the first block"
    assert all(torch.equal(*pair) for pair in zip(found[2]["some"], expected[2]["some"], strict=True))
    for file in sorted((tmp_path / "whole-out").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "again-out" / file.name).read_bytes(), file.name


def test_a_damaged_block_of_an_unfinished_run_is_one_line(small, tmp_path):
    blockwise(small, tiny_model("llama"), tmp_path / "work").train()
    path = min((tmp_path / "work").glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(rankfold.RankfoldError, match=rf"{path.name} is damaged .*; remove .*work and start again"):
        blockwise(small, tiny_model("llama"), tmp_path / "work").train()


def test_a_block_that_gains_nothing_keeps_its_closed_form(small, tmp_path):
    run = blockwise(small, tiny_model("llama"), tmp_path / "work", lr=1e6)
    _, before, after, facts = run.train()
    assert all(torch.equal(*pair) for pair in zip(before["some"], after["some"], strict=True))
    assert all(not block["trained"] and block["error"] == block["error_before"] for block in facts["blocks"].values())
    assert facts["tuned_parameters"] == 0


def test_blocks_in_coordinates_of_their_own_are_refused(tmp_path):
    method = rankfold.make_method("slicegpt", sparsity=0.3)
    rankfold.compress(tiny_model("llama"), method=method, calibration=tokens(), output=tmp_path / "s", device="cpu")
    with pytest.raises(rankfold.RankfoldError, match="in coordinates of their own"):
        blockwise(tmp_path / "s", tiny_model("llama"), tmp_path / "work")


def test_blocks_that_share_bases_are_refused(tmp_path):
    method = rankfold.make_method("basis-sharing", sparsity=0.3, rank_multiple=2)
    rankfold.compress(tiny_model("llama"), method=method, calibration=tokens(), output=tmp_path / "s", device="cpu")
    with pytest.raises(rankfold.RankfoldError, match="share bases, so none of them can be trained by itself"):
        blockwise(tmp_path / "s", tiny_model("llama"), tmp_path / "work")


def test_another_number_of_blocks_than_the_record_says_is_refused(small, tmp_path):
    dense = tiny_model("llama")
    dense.config.num_hidden_layers, dense.model.layers = 1, dense.model.layers[:1]
    with pytest.raises(rankfold.RankfoldError, match="the model has 3 blocks where 1 of the dense model are left"):
        blockwise(small, dense, tmp_path / "work")


def test_a_dense_model_of_another_width_is_refused(small, tmp_path):
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA | {"hidden_size": 64}))
    with pytest.raises(rankfold.RankfoldError, match="have a width of 32 and those of the dense one 64; give"):
        blockwise(small, dense, tmp_path / "work")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": None}, "blockwise=True writes one block at a time to a folder; give output"),
        ({"tune": "lora"}, "give tune='all' or tune='norms', got tune='lora'"),
        ({"minutes": 3, "loss": "both"}, "leave out minutes, loss"),
    ],
)
def test_options_without_effect_are_refused(small, tmp_path, options, message):
    with pytest.raises(rankfold.RankfoldError, match=message):
        recover(small, tiny_model("llama"), **{"output": tmp_path / "out", "blockwise": True, **options})


def test_a_model_in_memory_is_refused(tmp_path):
    with pytest.raises(rankfold.RankfoldError, match="the model is in memory; write it to a folder"):
        recover(tiny_model("llama"), tiny_model("llama"), output=tmp_path / "out", blockwise=True)
