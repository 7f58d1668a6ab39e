"""Share a compressed checkpoint on the Hugging Face hub, with a model card that its search understands."""

import contextlib
import re
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from .._utils.hub_id import is_hub_id
from .._utils.reporting import asking_hub
from ..data.hub import ALIASES
from ..errors import CheckpointError, OptionError, option
from ..report.outcomes import marked_warnings, trainings_of
from ..report.record import NAME, read_record, records_of

CARD = "README.md"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
ADVICE = "check the name, the connection and your token (`hf auth login`)"


def push(folder: str | Path, repo_id: str, *, private: bool = False, force: bool = False) -> str:
    """Upload a compressed checkpoint to a repository of the Hugging Face hub, in one commit.

    Weights of another model that was uploaded there before are removed in it: loaders would read them.

    License, language and task are those of the dense model's card, where that model is on the hub.

    Args:
        folder: of the checkpoint; it is not changed.
        repo_id: ``owner/name``; made where there is none.
        private: make it private, where it is made.
        force: upload a model that is marked as damaged.

    Returns:
        The address of the commit.

    Raises:
        OptionError: the repository id is none, or the model is damaged and ``force`` is not given.
        CheckpointError: the folder is no finished checkpoint, or the hub refuses it.
    """
    folder = Path(folder)
    if not is_hub_id(repo_id):
        raise OptionError(f"the repository must be OWNER/NAME, got {repo_id!r}")
    if not (folder / NAME).is_file() or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint of rankfold; give the folder that `compress` wrote")
    record = read_record(folder)
    damage = [text for one in records_of(record) for mark, text in marked_warnings(one) if mark == "damaged"]
    if damage and not force:
        raise OptionError(
            f"{folder.name} is damaged ({damage[0]}); compress it less, or upload it with {option('force', True)}"
        )
    api = HfApi()
    with asking_hub(repo_id, f"cannot upload to {repo_id!r}", ADVICE):
        card = card_for_hub(folder, record, api)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CARD)
        operations: list[Any] = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        operations.append(CommitOperationAdd(CARD, str(card).encode()))
        api.create_repo(repo_id, private=private, exist_ok=True)
        names = {one.path_in_repo for one in operations}
        earlier = [name for name in api.list_repo_files(repo_id) if WEIGHTS.fullmatch(name) and name not in names]
        operations += [CommitOperationDelete(name) for name in earlier]
        message = f"{record['base_model']} compressed by rankfold {record['rankfold_version']}"
        return str(api.create_commit(repo_id, operations, commit_message=message).commit_url)


def card_for_hub(folder: Path, record: dict[str, Any], api: HfApi) -> ModelCard:
    """Return the model card with what hub search goes by."""
    card = ModelCard.load(folder / CARD)
    base, data, of_base = record["base_model"], cast(ModelCardData, card.data), None
    if is_hub_id(base):
        # It was deleted since, or is a folder whose name looks like an id.
        with contextlib.suppress(RepositoryNotFoundError, RevisionNotFoundError):
            of_base = api.model_info(base, revision=record.get("revision"))
    if of_base:
        known = of_base.card_data.to_dict() if of_base.card_data else {}
        for key in ("license", "license_name", "license_link", "language"):
            if known.get(key):
                setattr(data, key, known[key])
        data.pipeline_tag = of_base.pipeline_tag
        data.base_model, data["base_model_relation"] = base, "finetune"
    else:
        data.base_model = None
    texts = [
        text["source"] for one in records_of(record) for text in one["calibration"].get("texts") or [one["calibration"]]
    ]
    texts += [text for training in trainings_of(record) for text in training["texts"]]
    data.datasets = sorted({ALIASES[text].path for text in texts if text in ALIASES}) or None
    data.model_name, data.eval_results = folder.name, _results(record) or None
    return card


def _results(record: dict[str, Any]) -> list[EvalResult]:
    """Return perplexities as model-index has them: on the held-out text of the training, or else of the calibration."""
    if trained := trainings_of(record):
        measured = {name: facts["perplexity"] for name, facts in trained[-1]["held_out"].items()}
    else:
        held_out = record.get("held_out") or {}
        measured = {"held-out calibration text": held_out["perplexity"]} if "perplexity" in held_out else {}
    return [
        EvalResult("text-generation", "text", name, "perplexity", round(value, 3), metric_name="perplexity")
        for name, value in measured.items()
    ]
