"""The tokenizer, and the processor of images or of images and text, that lie beside a model's weights."""

import contextlib
import json
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from .._utils.files import write_bytes, write_json
from .._utils.reporting import reporting
from ..errors import CheckpointError, OptionError, first_line
from .gguf_reader import parsed_once

_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MORE = ("added_tokens.json", "chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json")
_MORE += ("additional_chat_templates/*.jinja", "spiece.model")
# Keys of configs whose values are code or files elsewhere; transformers reads none of them from a folder.
_PLACES = ("auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_BESIDE_IT = ("video_preprocessor_config.json", "chat_template.json")
# What sentence-transformers reads; the first names folders of its modules behind the encoder, such as 1_Pooling.
_SENTENCES = ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json")
_MODULES = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors", "[0-9]*_*/*.bin")


@dataclass(frozen=True)
class TokenizerFiles:
    """Where a tokenizer is read from: a folder, or a GGUF file in it.

    Raises:
        CheckpointError: when one is loaded that is not there, or cannot be read.
    """

    folder: Path
    gguf: str | None = None
    revision: str | None = None  # commit, where the folder is the hub id of a model in memory

    @classmethod
    def beside(cls, model: Path) -> "TokenizerFiles":
        """Of a model folder or a ``.gguf`` file."""
        return cls(model.parent, model.name) if model.is_file() else cls(model)

    @property
    def exist(self) -> bool:
        """Whether there is a tokenizer; a folder of weights alone has none."""
        return self.gguf is not None or any((self.folder / name).exists() for name in _NAMES)

    def own(self, tokenizer) -> list[Path]:
        """Files of a tokenizer that was read from here, relative to the folder."""
        patterns = {*_NAMES, *_MORE, *type(tokenizer).vocab_files_names.values()}
        return sorted(path.relative_to(self.folder) for pattern in patterns for path in self.folder.glob(pattern))

    @property
    def around(self) -> list[Path]:
        """Files that say what surrounds the model, relative to the folder: what prepares images, and what is made of
        the states of a sentence encoder. Beside a GGUF file lies what belongs to others."""
        if self.gguf:
            return []
        found = [self.folder / name for name in (*_PROCESSOR, *_BESIDE_IT)]
        found += [path for pattern in (*_SENTENCES, *_MODULES) for path in sorted(self.folder.glob(pattern))]
        return [path.relative_to(self.folder) for path in found if path.is_file()]

    def load(self):
        if self.folder.is_dir() and not self.exist:  # for some families transformers makes up an empty one
            raise CheckpointError(
                f"there is no tokenizer in {self.folder}; put the tokenizer files next to the weights"
            )
        options = {} if self.gguf is None else {"gguf_file": self.gguf}
        options |= {} if self.revision is None or self.folder.is_dir() else {"revision": self.revision}
        what = f"no tokenizer can be read from {self.folder / (self.gguf or '')}"
        reading = contextlib.nullcontext() if self.gguf is None else parsed_once()
        with reading, reporting(CheckpointError, what, "put the tokenizer files next to the weights"):
            found = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False, **options)
        found.init_kwargs.pop("auto_map", None)  # to code that is not run, and not beside what is saved
        return found

    def load_image_processor(self):
        """The image processor of an encoder.

        Raises:
            OptionError: it needs a package that is not installed.
        """
        with self._reading("image processor", f"put the model's own {_PROCESSOR[0]} beside the weights"):
            return AutoImageProcessor.from_pretrained(self.folder, trust_remote_code=False)

    def load_processor(self):
        """The processor of a model of images and text.

        Raises:
            OptionError: it needs a package that is not installed.
        """
        advice = f"put the model's own {' and '.join(_PROCESSOR)} beside the weights"
        with self._reading("processor of images and text", advice):
            found = AutoProcessor.from_pretrained(self.folder, trust_remote_code=False)
        if not hasattr(found, "image_processor"):  # transformers then gives the tokenizer, or whatever there is
            raise CheckpointError(f"there is no processor of images and text in {self.folder}; {advice}")
        return found

    @contextlib.contextmanager
    def _reading(self, what: str, advice: str) -> Generator[None]:
        with reporting(CheckpointError, f"no {what} can be read from {self.folder}", advice):
            try:
                yield
            except ImportError as error:  # torchvision or, for SmolVLM, num2words
                raise OptionError(
                    f"the {what} in {self.folder} needs a package that is not installed ({first_line(error)}); "
                    "install it"
                ) from error


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Write a tokenizer: the files it was read from as they are, or, where it was changed since, what transformers
    writes.

    What transformers writes names a class that earlier versions do not have, and leaves out settings and files that
    they and other programs read, such as ``add_bos_token`` and ``tokenizer.model``.
    """
    files = TokenizerFiles(Path(getattr(tokenizer, "name_or_path", None) or folder))
    if not (files.exist and _is_unchanged(tokenizer, files)):
        tokenizer.save_pretrained(folder)
        return
    for name in files.own(tokenizer):
        (folder / name).parent.mkdir(exist_ok=True)
        copy_file(files.folder / name, folder / name)


def copy_file(file: Path, place: Path) -> None:
    """Copy a file as it is, but for what a config names and the result lacks: code, which is not run, and places."""
    if file.name.endswith("config.json"):
        with contextlib.suppress(ValueError):  # a damaged file stays what it is
            found = json.loads(file.read_text(encoding="utf-8"))
            if (plain := _without_places(found)) != found:
                return write_json(place, plain)
    write_bytes(place, file.read_bytes())


def _without_places(value):
    if isinstance(value, dict):
        return {name: _without_places(part) for name, part in value.items() if name not in _PLACES}
    return [_without_places(part) for part in value] if isinstance(value, list) else value


def _is_unchanged(tokenizer, files: TokenizerFiles) -> bool:
    """Whether a tokenizer still is the one that its files describe: transformers writes the same of both."""
    with tempfile.TemporaryDirectory() as place:
        written = [Path(place, name) for name in ("now", "then")]
        tokenizer.save_pretrained(written[0])
        try:
            files.load().save_pretrained(written[1])
        except CheckpointError:  # the caller read it in another way, with code of its own
            return False
        now, then = ({path.relative_to(f): path.read_bytes() for path in f.rglob("*.*")} for f in written)
    return now == then
