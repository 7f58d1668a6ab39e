"""Folders of moments: the same numbers back, and nothing unfinished or foreign taken for them."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankfold._utils.files import write_json, write_tensors
from rankfold._utils.locking import lock_of, locked
from rankfold.calibration.moments import Moment
from rankfold.calibration.store import MomentStore
from rankfold.errors import CheckpointError

IDENTITY = {
    "name": "tiny",
    "model": "f00d",
    "blocks": 2,
    "dtype": "float32",
    "autocast": None,
    "tokens": {
        "source": "a.txt",
        "origin": "/a.txt",
        "num_samples": 2,
        "max_length": 8,
        "tokens": 16,
        "seed": 0,
        "sha256": "0" * 32,
    },
    "statistics": ["influence", "mlp_hidden", "query"],
}


def block(seed: int) -> dict[str, Moment]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "mlp_hidden": Moment(16, draw(5), draw(5).abs(), draw(5, 5)),
        "query": Moment(16, draw(2, 3), None, draw(2, 3, 3)),
        "query_key": Moment(1e17 + 2.0, None, None, draw(2, 3, 3)),
        "influence": Moment(16, draw(3), None, None),
        "mlp_samples": Moment(4, None, None, None, draw(4, 5)),
    }


def source(fingerprint: str = "f00d", dtype=torch.float32):
    """What a store looks at in a model."""
    return SimpleNamespace(fingerprint=fingerprint, dtype=dtype)


def same(a: dict[str, Moment], b: dict[str, Moment]) -> None:
    """Equal up to the fp32 they are stored in."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].count == b[name].count
        for part in ("total", "absolute", "second", "rows", "windows"):
            x, y = getattr(a[name], part), getattr(b[name], part)
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x.float(), y.float())


@pytest.fixture
def folder(tmp_path):
    """A finished folder of two blocks."""
    store = MomentStore.create(IDENTITY, tmp_path / "moments")
    store[0], store[1] = block(0), block(1)
    store.finish()
    return tmp_path / "moments"


def test_a_folder_gives_back_what_was_put_in(folder):
    store = MomentStore.open(folder)
    assert store.identity == IDENTITY
    assert store.missing(3) == {2}
    same(store[0], block(0))
    same(store[1], block(1))


def test_memory_gives_back_what_was_put_in():
    store = MomentStore.create(IDENTITY, None)
    assert store.missing(1) == {0}
    store[0] = block(0)
    store.finish()
    assert store.missing(1) == set()
    same(store[0], block(0))


def test_a_store_to_be_filled_knows_its_held_out_windows(tmp_path):
    ids = torch.arange(12).view(2, 6)
    for folder in (None, tmp_path / "moments"):
        assert torch.equal(MomentStore.create(IDENTITY, folder, ids).held_out, ids)


def test_the_order_in_which_an_identity_was_written_does_not_matter(folder):
    same(MomentStore(dict(reversed(IDENTITY.items())), folder, None)[0], block(0))


def test_equal_identities_hold_the_same_numbers(folder):
    """In memory or in a folder: a compression must not depend on where its moments were kept."""
    memory = MomentStore.create(IDENTITY, None)
    memory[0] = block(0)
    stored = MomentStore.open(folder)[0]
    for name, moment in memory[0].items():
        if moment.second is not None:
            assert torch.equal(moment.second_moment(), stored[name].second_moment())


def test_one_file_a_block_and_nothing_temporary(folder):
    assert sorted(p.name for p in folder.iterdir()) == [
        "block-00000.safetensors",
        "block-00001.safetensors",
        "moments.json",
    ]


def test_an_interrupted_folder_is_refused_and_can_be_continued(tmp_path):
    folder = tmp_path / "moments"
    MomentStore.create(IDENTITY, folder)[0] = block(0)
    with pytest.raises(
        CheckpointError, match=r"calibration in .*moments did not finish; call rankfold.calibrate again"
    ):
        MomentStore.open(folder)
    store = MomentStore.create(IDENTITY, folder)
    assert store.missing(2) == {1}
    store[1] = block(1)
    store.finish()
    same(MomentStore.open(folder)[0], block(0))


def test_a_finished_folder_is_used_again(folder):
    store = MomentStore.create(IDENTITY, folder)
    assert store.missing(2) == set()
    store.finish()
    assert MomentStore.open(folder).identity == IDENTITY


def test_finishing_twice_is_harmless(folder):
    store = MomentStore.create(IDENTITY, folder)
    store.finish()
    store.finish()
    same(MomentStore.open(folder)[1], block(1))


@pytest.mark.parametrize(
    "change", [{"model": "beef"}, {"dtype": "bfloat16"}, {"statistics": ["query"]}, {"tokens": {}}]
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_identity_is_refused(folder, change, finished):
    if not finished:
        (folder / "moments.json").rename(folder / "moments.unfinished.json")
    with pytest.raises(CheckpointError, match="holds moments of another model, text or setting; choose another folder"):
        MomentStore.create({**IDENTITY, **change}, folder)
    assert (folder / "block-00000.safetensors").exists()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a moments folder; choose another folder"):
        MomentStore.create(IDENTITY, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_taken(tmp_path):
    MomentStore.create(IDENTITY, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["moments.unfinished.json"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "moments").write_text("mine")
    with pytest.raises(CheckpointError, match=r"moments"):
        MomentStore.create(IDENTITY, tmp_path / "moments")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/moments: Not a directory"):
        MomentStore.create(IDENTITY, tmp_path / "file" / "moments")


def test_a_folder_that_is_no_moments_folder_says_how_to_make_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a moments folder; make one with rankfold.calibrate"):
        MomentStore.open(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "rubbish", "flipped", "another block", "of other moments"])
def test_a_damaged_block_is_named(folder, damage, caplog):
    file = folder / "block-00001.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "of other moments":
        other = MomentStore.create({**IDENTITY, "model": "beef"}, folder.with_name("other"))
        other[1] = block(1)
        content = (other.folder / file.name).read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    another = (folder / "block-00000.safetensors").read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        "rubbish": b"rubbish" * 10,
        "flipped": flipped,
        "another block": another,
        "of other moments": content,
    }
    if damage != "missing":
        file.write_bytes(damaged[damage])
    store = MomentStore.open(folder)
    same(store[0], block(0))
    with pytest.raises(
        CheckpointError,
        match=r"block-00001\.safetensors is missing or damaged \(.*\); rankfold.calibrate with the same options",
    ):
        store[1]
    assert store.missing(2) == {1}
    assert damage == "missing" or "measures it anew; measuring the block again" in caplog.text


def test_a_damaged_record_is_named(folder):
    (folder / "moments.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"moments\.json is missing or damaged"):
        MomentStore.open(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": None}, r"moments\.json is damaged: tokens should be an object, got 'None'; copy or make it again"),
        ({"tokens": {"num_samples": 2}}, r"tokens lacks source, origin, max_length, tokens, seed, sha256; copy"),
        ({"statistics": ["query", 5]}, r"statistics\.1 should be a string, got '5'"),
        ({"blocks": True}, r"blocks should be a whole number, got 'True'"),
    ],
)
def test_a_record_with_something_else_in_it_is_named(folder, change, message):
    write_json(folder / "moments.json", IDENTITY | change)
    with pytest.raises(CheckpointError, match=message):
        MomentStore.open(folder)


def test_a_record_that_lacks_something_is_named(folder):
    write_json(folder / "moments.json", {key: value for key, value in IDENTITY.items() if key != "model"})
    with pytest.raises(CheckpointError, match=r"moments\.json is damaged: it lacks model; copy or make it again"):
        MomentStore.open(folder)


@pytest.mark.parametrize("damage", ["missing", "others"])
def test_held_out_windows_that_are_damaged_are_named_and_made_anew(tmp_path, damage):
    ids, folder = torch.arange(16).view(2, 8), tmp_path / "moments"
    digest = hashlib.sha256(ids.numpy()).hexdigest()[:32]
    identity = IDENTITY | {"tokens": IDENTITY["tokens"] | {"held_out": 2, "held_out_sha256": digest}}
    with MomentStore.filling(identity, folder, ids):
        pass
    (folder / "held-out.safetensors").unlink()
    if damage == "others":
        write_tensors(folder / "held-out.safetensors", {"ids": ids + 1})
    with pytest.raises(
        CheckpointError,
        match=r"held-out\.safetensors is missing or damaged .*rankfold.calibrate with the same options",
    ):
        MomentStore.open(folder)
    with MomentStore.filling(identity, folder, ids):
        pass
    assert torch.equal(MomentStore.open(folder).held_out, ids)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that takes no files")
def test_a_place_that_takes_no_lock_is_not_said_to_be_held():
    with pytest.raises(CheckpointError, match=r"cannot lock /proc/moments: no file can be made next to it, or"):
        with locked(lock_of(Path("/proc/moments")), Path("/proc/moments")):
            pass


def test_two_processes_do_not_fill_one_folder(tmp_path):
    with MomentStore.filling(IDENTITY, tmp_path / "moments"):
        with pytest.raises(
            CheckpointError, match=rf"moments is being written by process {os.getpid()} on .*; wait until it is done or"
        ):
            with MomentStore.filling(IDENTITY, tmp_path / "moments"):
                pass
    assert os.listdir(tmp_path / "moments") == ["moments.json"]


@pytest.mark.parametrize("left", ["moments.unfinished.json.tmp", ".rankfold.lock", "moments.unfinished.json"])
def test_what_a_kill_leaves_behind_is_no_obstacle(tmp_path, left):
    (tmp_path / left).write_text(json.dumps(IDENTITY) if left.endswith("json") else "")
    with MomentStore.filling(IDENTITY, tmp_path):
        pass
    assert os.listdir(tmp_path) == ["moments.json"]


def test_moments_of_another_model_are_refused(folder):
    store = MomentStore.open(folder)
    store.check(source(), {"query"})
    with pytest.raises(CheckpointError, match=r"measured on another model \(tiny\); calibrate this one"):
        store.check(source(fingerprint="beef"), {"query"})


def test_moments_of_another_precision_are_refused(folder):
    with pytest.raises(
        CheckpointError, match=r"measured on weights in float32, not bfloat16; use that dtype or calibrate"
    ):
        MomentStore.open(folder).check(source(dtype=torch.bfloat16, fingerprint="beef"), {"query"})


def test_missing_statistics_are_named(folder):
    with pytest.raises(CheckpointError, match="lack key, value; calibrate again for this method"):
        MomentStore.open(folder).check(source(), {"query", "value", "key"})
    with pytest.raises(CheckpointError, match="the moments in memory lack key"):
        MomentStore.create(IDENTITY, None).check(source(), {"key"})
