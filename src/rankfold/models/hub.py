"""Where a model lies: a local folder or file, or a snapshot from the hub."""

import contextlib
import functools
import re
from pathlib import Path

from .._utils.hub_id import is_hub_id
from .._utils.reporting import asking_hub
from ..errors import CheckpointError, OptionError

COMMIT = re.compile("[0-9a-f]{40}")
ONE_WORD = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.gguf)")


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return a hub id and its revision; ``None``: the default branch.

    Args:
        name: ``owner/name``, or ``owner/name@revision``.
        revision: branch, tag or commit, where the name has none.

    Raises:
        OptionError: there are two revisions, or an empty one.
    """
    repository, at, named = name.partition("@")
    if at and revision is not None:
        raise OptionError(f"{name!r} names a revision already, got revision {revision!r} too; give one of them")
    if named.strip() == "" if at else revision is not None and not revision.strip():
        raise OptionError(f"the revision of {repository!r} is empty; give a branch, a tag or a commit, or leave it out")
    return repository, named if at else revision


def repository_of(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return a hub id and its revision as :func:`split_revision` does, of what does not lie here.

    The owner of a model that the hub knows by one word, such as ``gpt2``, is asked for.

    Raises:
        OptionError: as there.
        CheckpointError: this is no hub id, and no such word.
    """
    repository, wanted = split_revision(name, revision)
    if is_hub_id(repository):
        return repository, wanted
    expected = "a folder, a .gguf file, or a hub id such as owner/name or owner/name@revision"
    what = f"no model at {name!r}: expected {expected}"
    if not ONE_WORD.fullmatch(repository):
        raise CheckpointError(what)
    with asking_hub(repository, what, ""):
        return _with_owner(repository), wanted


def full_name(name: str) -> str:
    """Return the hub id of a model in memory; one that transformers loaded by one word lies in its cache by that."""
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(CheckpointError, ValueError):  # the hub cannot be asked, or knows no such names
        if ONE_WORD.fullmatch(name) and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return repository_of(name)[0]
    return name


@functools.cache
def _with_owner(word: str) -> str:
    from huggingface_hub import HfApi

    return HfApi().model_info(word, timeout=10).id


def locate(name: str, revision: str | None = None) -> Path:
    """Return the folder of a local path or hub id.

    Args:
        name: a path, ``owner/name`` or ``owner/name@revision``; what there is here comes first.
        revision: of a hub id: branch, tag or commit.

    Raises:
        OptionError: a revision of what lies here, or two of them.
        CheckpointError: no such folder, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise OptionError(f"a revision is of a hub id, and {name!r} lies here, got {revision!r}; leave it out")
        return path
    repository, wanted = repository_of(name, revision)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
    copies = ["consolidated*", "original/*"]  # the same weights in the maker's own format
    what = f"cannot get {repository!r}{f' at revision {wanted!r}' if wanted else ''} from the hub"
    advice = "check the name and the connection, or download it elsewhere and give the folder"
    with asking_hub(repository, what, advice):
        return Path(snapshot_download(repository, revision=wanted, allow_patterns=patterns, ignore_patterns=copies))


def commit_of(folder: Path) -> str | None:
    """Return the commit of a snapshot of the hub, which is the name of its folder; ``None`` for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else None
