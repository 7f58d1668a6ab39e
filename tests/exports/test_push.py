"""A checkpoint goes to the hub in one commit with a card that search understands; the hub is a stand-in."""

import json
import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

import rankfold
from rankfold.exports import push as package
from saved import save_text, save_tiny

MODULE = "rankfold.exports.hub"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    place = tmp_path_factory.mktemp("push")
    save_tiny(place / "dense", blocks=2)
    save_text(place / "text.txt")
    data = {"calibration": str(place / "text.txt"), "num_samples": 8, "max_length": 32}
    rankfold.compress(str(place / "dense"), 0.3, method="modegpt", rank_multiple=2, output=place / "small", **data)
    return place / "small"


class Hub:
    """Notes what it is asked."""

    def __init__(self, error: Exception | None = None):
        self.made, self.commits, self.error, self.there, self.removed = [], [], error, [], []

    def model_info(self, name, revision=None):
        data = ModelCardData(license="apache-2.0", language=["en"], tags=["chat"])
        return SimpleNamespace(card_data=data, pipeline_tag="text-generation")

    def create_repo(self, name, private, exist_ok):
        if self.error:
            raise self.error
        self.made.append((name, private, exist_ok))

    def list_repo_files(self, name):
        return self.there

    def create_commit(self, name, operations, commit_message):
        added = [one for one in operations if isinstance(one, CommitOperationAdd)]
        self.removed = [one.path_in_repo for one in operations if one not in added]
        self.commits.append((name, {one.path_in_repo: one.path_or_fileobj for one in added}, commit_message))
        return SimpleNamespace(commit_url=f"https://hub.example/{name}/commit/1")


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    monkeypatch.setattr(f"{MODULE}.HfApi", lambda: found)
    return found


def changed(small, tmp_path, **facts):
    """Return a copy whose record says something else."""
    shutil.copytree(small, tmp_path / "copy")
    record = json.loads((small / "rankfold.json").read_text())
    (tmp_path / "copy" / "rankfold.json").write_text(json.dumps(record | facts))
    return tmp_path / "copy"


def test_every_file_goes_up_in_one_commit(small, hub):
    before = {path.name: path.read_bytes() for path in small.iterdir()}
    address = rankfold.push(small, "me/small", private=True)
    assert address == "https://hub.example/me/small/commit/1" and hub.made == [("me/small", True, True)]
    ((name, files, message),) = hub.commits
    assert name == "me/small" and files.keys() == before.keys() and message.startswith("dense compressed by rankfold")
    assert {path.name: path.read_bytes() for path in small.iterdir()} == before  # nothing of it is changed


def test_weights_of_an_earlier_upload_are_removed(small, hub):
    """`recover` writes one file and `compress` several; transformers reads the one where both are there."""
    kept = sorted(path.name for path in small.iterdir())
    assert "model.safetensors" not in kept
    hub.there = [*kept, "model.safetensors", "model-00001-of-00009.safetensors", "notes.md", ".gitattributes"]
    rankfold.push(small, "me/small")
    assert hub.removed == ["model.safetensors", "model-00001-of-00009.safetensors"]


def test_the_card_has_what_search_goes_by(small, hub, tmp_path):
    record = json.loads((small / "rankfold.json").read_text())
    texts = [{**record["calibration"], "source": name, "share": 0.5} for name in ("wikitext2", "python-source")]
    folder = changed(
        small, tmp_path, base_model="org/name", revision="b" * 40, calibration=record["calibration"] | {"texts": texts}
    )
    rankfold.push(folder, "me/small")
    data = ModelCard(hub.commits[0][1]["README.md"].decode()).data.to_dict()
    assert data["license"] == "apache-2.0" and data["language"] == ["en"] and data["pipeline_tag"] == "text-generation"
    assert data["base_model"] == "org/name" and data["base_model_relation"] == "finetune"
    assert data["datasets"] == ["Salesforce/wikitext"] and data["library_name"] == "transformers"
    assert data["tags"] == ["rankfold", "compressed", "modegpt"]  # its own, not those of the base model
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"][0] == {
        "type": "perplexity",
        "value": round(record["held_out"]["perplexity"], 3),
        "name": "perplexity",
    }


def test_texts_of_a_training_are_data_sets_of_the_model_too(small, hub, tmp_path):
    facts = {"tune": "all", "loss": "kl", "length": 8, "seed": 0, "teacher_name": "dense"}
    facts |= {"tokens_seen": 32, "tuned_parameters": 10, "recovered": True}
    folder = changed(small, tmp_path, recovery=facts | {"texts": {"c4": {"num_samples": 8}}, "held_out": {}})
    rankfold.push(folder, "me/small")
    assert ModelCard(hub.commits[0][1]["README.md"].decode()).data.to_dict()["datasets"] == ["allenai/c4"]


def test_a_model_that_lay_here_names_none_on_the_hub(small, hub):
    rankfold.push(small, "me/small")
    data = ModelCard(hub.commits[0][1]["README.md"].decode()).data.to_dict()
    assert not {"base_model", "license", "datasets"} & data.keys()
    here = ModelCard.load(small / "README.md").data.to_dict()  # what another program would upload
    assert "base_model" not in here and here["pipeline_tag"] == "text-generation"


def test_so_does_one_that_the_hub_no_longer_has(small, hub, tmp_path, monkeypatch):
    def deleted(*_, **__):
        raise RepositoryNotFoundError("401 Client Error.", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(hub, "model_info", deleted)
    rankfold.push(changed(small, tmp_path, base_model="org/name"), "me/small")
    data = ModelCard(hub.commits[0][1]["README.md"].decode()).data.to_dict()
    assert not {"base_model", "license", "base_model_relation"} & data.keys()


def test_a_damaged_model_goes_up_only_when_forced(small, hub, tmp_path):
    record = json.loads((small / "rankfold.json").read_text())
    folder = changed(small, tmp_path, held_out=record["held_out"] | {"warning": "THE MODEL IS DAMAGED: x 40"})
    with pytest.raises(rankfold.RankfoldError, match="is damaged .*x 40.*force=True"):
        rankfold.push(folder, "me/small")
    assert not hub.made and not hub.commits
    rankfold.push(folder, "me/small", force=True)
    assert len(hub.commits) == 1


def test_what_is_no_checkpoint_or_no_repository_is_refused(small, hub, tmp_path):
    for name in ("small", "a/b/c", "/small", "me/"):
        with pytest.raises(rankfold.RankfoldError, match="must be OWNER/NAME"):
            rankfold.push(small, name)
    with pytest.raises(rankfold.RankfoldError, match="no finished checkpoint"):
        rankfold.push(tmp_path, "me/small")
    assert not hub.commits


def test_what_the_hub_refuses_is_one_line(small, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.HfApi", lambda: Hub(OSError("401 Unauthorized\nmore")))
    with pytest.raises(
        rankfold.RankfoldError, match=r"cannot upload to 'me/small' \(401 Unauthorized\); check the name"
    ):
        package(small, "me/small")


def test_what_the_hub_refuses_is_told_by_its_kind(small, hub):
    said = "403 Client Error.\n\nMore of it"
    hub.error = RepositoryNotFoundError(said, response=SimpleNamespace(headers={}, request=None))
    with pytest.raises(rankfold.RankfoldError, match=r"cannot upload to 'me/small' \(there is no such repository, or"):
        rankfold.push(small, "me/small")


@pytest.mark.parametrize(
    ("status", "told"), [(401, "there is no token, or it does not allow this"), (500, "Client error")]
)
def test_a_token_that_is_missing_or_may_not_write_is_told(small, hub, status, told):
    said = f"Client error '{status}' for url 'https://huggingface.co/api/repos/create'"
    hub.error = HfHubHTTPError(said, response=SimpleNamespace(headers={}, request=None, status_code=status))
    with pytest.raises(rankfold.RankfoldError, match=rf"^cannot upload to 'me/small' \({told}"):
        rankfold.push(small, "me/small")


def test_a_revision_of_the_dense_model_that_was_removed_since_is_left_out(small, hub, tmp_path, monkeypatch):
    def gone(name, revision=None):
        raise RevisionNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(hub, "model_info", gone)
    rankfold.push(changed(small, tmp_path, base_model="owner/dense", revision="gone"), "me/small")
    assert len(hub.commits) == 1
