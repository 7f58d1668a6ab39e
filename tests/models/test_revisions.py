"""Revisions of hub ids: what is asked of the hub, which lies in a local folder here, and what the results say of it."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors

import rankfold
from families import tiny_model, tokens
from rankfold.errors import CheckpointError, OptionError
from rankfold.models.hub import commit_of, locate, split_revision
from rankfold.models.outline import open_outline
from saved import save_tiny

COMMITS = {"main": "a" * 40, "v1": "b" * 40, "refs/pr/7": "c" * 40}
TEXT = "--calibration pydoc --num-samples 4 --max-length 32"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("revisions")


@pytest.fixture(scope="module")
def snapshots(place):
    """A snapshot of every revision, as the cache of the hub has it; all differ."""
    folder = place / "cache" / "models--owner--name" / "snapshots"
    for number, commit in enumerate(COMMITS.values()):
        save_tiny(folder / commit, blocks=2, rms_norm_eps=10.0 ** -(number + 4))
    return folder


@pytest.fixture
def hub(snapshots, monkeypatch):
    """Stands in for the hub; the names and revisions that it was asked for."""
    asked = []

    def download(name, *, revision=None, **_):
        asked.append((name, revision))
        commit = COMMITS.get(revision or "main", revision)
        if not (snapshots / commit).exists():
            raise ConnectionError(f"Invalid rev id: {revision}")
        return str(snapshots / commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("wanted", [*COMMITS, COMMITS["v1"], None])
def test_the_revision_is_asked_of_the_hub_and_the_commit_kept(hub, wanted):
    ways = [{"model": f"owner/name@{wanted}"}, {"model": "owner/name", "revision": wanted}]
    for way in ways if wanted else ways[1:]:
        source = rankfold.open_model(**way)
        commit = COMMITS.get(wanted or "main", wanted)
        assert hub.pop() == ("owner/name", wanted) and not hub
        assert (source.name, source.revision) == ("owner/name", commit)
        number = [*COMMITS.values()].index(commit)
        assert source.config.rms_norm_eps == rankfold.load(**way).config.rms_norm_eps == 10.0 ** -(number + 4)
        hub.clear()


def test_commands_take_it_either_way_and_record_and_card_keep_the_commit(hub, place, run):
    for folder, model in (("one", "owner/name@v1"), ("other", "owner/name --revision v1")):
        code, _, err = run(f"compress {model} -o {folder} --rank-multiple 2 {TEXT}")
        assert code in (0, None), err
        record = json.loads((place / folder / "rankfold.json").read_text())
        assert record["base_model"] == "owner/name" and record["revision"] == COMMITS["v1"]
        card = (place / folder / "README.md").read_text()
        assert "base_model: owner/name\n" in card and f"owner/name at revision `{COMMITS['v1']}`, compressed" in card
        config = json.loads((place / folder / "config.json").read_text())
        assert config["quantization_config"]["revision"] == COMMITS["v1"]
    assert {revision for _, revision in hub} == {"v1"}


@pytest.mark.parametrize(
    "line",
    [
        f"plan MODEL {TEXT}",
        f"calibrate MODEL -o moments-NUMBER {TEXT}",
        "evaluate MODEL --text pydoc --max-length 16 --limit 1",
        "generate MODEL hello --max-new-tokens 2",
        "models MODEL",
    ],
)
def test_every_command_asks_for_the_revision(hub, run, line):
    for number, model in enumerate(("owner/name@refs/pr/7", "owner/name --revision refs/pr/7")):
        code, _, err = run(line.replace("MODEL", model).replace("NUMBER", str(number)))
        assert code in (0, None), err
        assert {*hub} == {("owner/name", "refs/pr/7")}


def test_a_model_that_the_hub_knows_by_one_word_is_that_of_its_owner(hub, place, run, monkeypatch):
    asked = []

    def model_info(self, name, **_):
        asked.append(name)
        return SimpleNamespace(id="owner/name")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    source = rankfold.open_model("one-word@v1")
    assert source.name == "owner/name" and {*hub} == {("owner/name", "v1")} and asked == ["one-word"]
    code, _, err = run(f"compress one-word -o by_word --rank-multiple 2 {TEXT}")
    assert code in (0, None), err
    assert json.loads((place / "by_word" / "rankfold.json").read_text())["base_model"] == "owner/name"
    assert hub.pop() == ("owner/name", None) and asked == ["one-word"]
    for name in ("./gpt2", "gpt2/", "model.gguf", "two words"):
        with pytest.raises(CheckpointError, match=f"no model at '{name}': expected a folder, a .gguf file, or a hub"):
            rankfold.open_model(name)
    assert asked == ["one-word"]


def test_a_model_in_memory_that_was_loaded_by_one_word_has_the_id_of_its_owner(monkeypatch):
    model, cached = tiny_model("llama"), {"lone": "snapshots/config.json"}
    model.name_or_path = "two--dashes"  # which no name of the hub has
    assert rankfold.open_model(model, device="cpu").name == "two--dashes"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, _: cached.get(name))
    for word in ("lone", "local"):
        model.name_or_path = word
        assert rankfold.open_model(model, device="cpu").name == word  # offline: the hub cannot be asked
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(id="owner/lone"))
    assert rankfold.open_model(model, device="cpu").name == "local"
    model.name_or_path = "lone"
    assert rankfold.open_model(model, device="cpu").name == "owner/lone"


def test_a_revision_that_is_not_there_is_named(hub):
    with pytest.raises(
        CheckpointError, match=r"cannot get 'owner/name' at revision 'v9' from the hub \(Invalid rev id: v9\)"
    ):
        rankfold.open_model("owner/name", revision="v9")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            errors.GatedRepoError,
            "it is gated); accept its conditions at https://huggingface.co/o/n and log in with `hf auth login`",
        ),
        (
            errors.RepositoryNotFoundError,
            "there is no such repository, or it is private); check the name, or log in with `hf auth login`",
        ),
        (errors.RevisionNotFoundError, "it has no such revision); give a branch, a tag or a commit of it"),
        (errors.RemoteEntryNotFoundError, "it has no such file); check the name"),
    ],
)
def test_what_the_hub_refuses_is_told_by_its_kind(kind, said, monkeypatch):
    """The first line of each is "401 Client Error."."""

    def refuse(*_, **__):
        raise kind("401 Client Error.\n\nMore of it", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    for function, what in ((rankfold.open_model, ""), (rankfold.load, ""), (open_outline, "the config of ")):
        with pytest.raises(CheckpointError) as raised:
            function("o/n")
        assert str(raised.value).startswith(f"cannot get {what}'o/n' from the hub ({said}")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "there is no token, or it does not allow this); log in with `hf auth login`, with a token that may"),
        (429, "429 of the hub); try again later"),
        (503, "503 of the hub); try again later"),
    ],
)
def test_an_answer_of_the_hub_is_no_lost_connection(status, said, monkeypatch):
    """The client raises it as one when it was answered in the middle of a download."""

    def refuse(*_, **__):
        response = SimpleNamespace(headers={}, request=None, status_code=status)
        answer = errors.HfHubHTTPError(f"{status} of the hub", response=response)
        raise errors.LocalEntryNotFoundError("Please check your connection") from answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError) as raised:
        rankfold.open_model("o/n")
    assert str(raised.value) == f"cannot get 'o/n' from the hub ({said}"


@pytest.mark.parametrize("function", [rankfold.open_model, rankfold.load])
def test_a_revision_of_something_else_is_refused(function, hub, snapshots):
    with pytest.raises(OptionError, match=r"names a revision already, got revision 'v1' too"):
        function("owner/name@main", revision="v1")
    with pytest.raises(OptionError, match=r"a revision is of a hub id, and '.*' lies here, got 'v1'"):
        function(snapshots / COMMITS["main"], revision="v1")
    with pytest.raises(OptionError, match=r"the revision of 'owner/name' is empty"):
        function("owner/name@")
    with pytest.raises(CheckpointError, match=r"no model at 'name@v1'"):
        function("name@v1")
    assert not hub


def test_the_command_line_refuses_it_too(hub, place, run, snapshots):
    shutil.copytree(snapshots / COMMITS["main"], place / "here", dirs_exist_ok=True)
    assert "--revision is of a hub id, and 'here' lies here, got 'v1'" in run(f"plan here --revision v1 {TEXT}")[2]
    assert "names a revision already" in run("generate owner/name@v1 x --revision v2")[2]
    assert "--revision v1 would be ignored without a model" in run("models --revision v1")[2]


def test_what_lies_here_comes_first(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name@v1").mkdir(parents=True)
    assert locate("owner/name@v1").name == "name@v1" and not hub


def test_a_model_in_memory_brings_its_commit(snapshots, monkeypatch):
    """transformers keeps it; the tokenizer is read at the same one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(snapshots / COMMITS["v1"])
    model.config._commit_hash, model.config._name_or_path = COMMITS["v1"], "owner/name"
    model.name_or_path = "owner/name"
    asked = []
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda place, **options: asked.append((str(place), options)) or SimpleNamespace(init_kwargs={}),
    )
    source = rankfold.open_model(model)
    assert (source.name, source.revision) == ("owner/name", COMMITS["v1"])
    _ = source.tokenizer
    assert asked == [("owner/name", {"trust_remote_code": False, "revision": COMMITS["v1"]})]
    with pytest.raises(OptionError, match="the model is in memory"):
        rankfold.open_model(model, revision="v1")


def test_where_transformers_keeps_no_commit_it_is_the_snapshot_with_the_same_weights(place, monkeypatch):
    """From 5.23 on."""
    cache = place / "cache_of_weights"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    snapshots = cache / "models--owner--two" / "snapshots"
    for commit in ("d" * 40, "e" * 40):
        save_tiny(snapshots / commit, blocks=2)
    changed = transformers.AutoModelForCausalLM.from_pretrained(snapshots / ("e" * 40))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(2)
    changed.save_pretrained(snapshots / ("e" * 40))
    (snapshots / ("f" * 40)).mkdir()  # a config alone, which `plan` has downloaded
    for commit in ("d" * 40, "e" * 40):
        model = transformers.AutoModelForCausalLM.from_pretrained(snapshots / commit, dtype=torch.bfloat16)
        model.config._commit_hash = None  # earlier versions keep it
        model.name_or_path = "owner/two"
        source = rankfold.open_model(model, device="cpu")
        assert (source.name, source.revision) == ("owner/two", commit)
    shutil.copytree(snapshots / ("e" * 40), snapshots / ("0" * 40))
    assert rankfold.open_model(model, device="cpu").revision is None  # it may be either
    model.name_or_path = "owner/other"
    assert rankfold.open_model(model, device="cpu").revision is None


def test_only_a_snapshot_has_a_commit(tmp_path):
    assert commit_of(tmp_path / "snapshots" / ("a" * 40)) == "a" * 40
    assert commit_of(tmp_path / ("a" * 40)) is None and commit_of(tmp_path / "snapshots" / "main") is None
    assert split_revision("owner/name") == ("owner/name", None)


def test_a_local_model_has_no_revision_in_its_record(snapshots, tmp_path):
    shutil.copytree(snapshots / COMMITS["main"], tmp_path / "model")
    source = rankfold.open_model(tmp_path / "model")
    rankfold.compress(
        source,
        method=rankfold.MoDeGPT(rank_multiple=2),
        calibration=tokens(),
        output=tmp_path / "small",
        mode="one-pass",
    )
    assert source.revision is None and "revision" not in json.loads((tmp_path / "small" / "rankfold.json").read_text())
