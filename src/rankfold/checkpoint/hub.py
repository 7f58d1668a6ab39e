"""Where a model lies: a local folder or file, or a snapshot from the hub."""

from pathlib import Path

from ..errors import CheckpointError, first_line

__all__ = ["locate"]


def locate(name: str) -> Path:
    """The folder of a local path or hub id.

    Raises:
        CheckpointError: no such folder, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"no model at {name!r}: expected a folder, a .gguf file, or a hub id such as owner/name")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
    copies = ["consolidated*", "original/*"]  # the same weights in the maker's own format
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=copies))
    except Exception as error:  # httpx, requests and hub errors share no base; all mean "not to be had"
        raise CheckpointError(
            f"cannot get {name!r} from the hub ({first_line(error)}); check the name and the connection, or download it "
            "elsewhere and give the folder"
        ) from error
