"""The tokenizer, and the processor of images or of images and text, that lie beside a model's weights."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from ..errors import CheckpointError, OptionError, first_line

__all__ = ["TokenizerFiles"]

# What tokenizers of other versions and converters read, and `save_pretrained` leaves out beside tokenizer.json.
_VOCABULARY = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
_NAMES = ("tokenizer.json", "tokenizer_config.json", *_VOCABULARY)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_BESIDE_IT = ("video_preprocessor_config.json", "chat_template.json")
# What sentence-transformers reads; the first names folders of its modules behind the encoder, such as 1_Pooling.
_SENTENCES = ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json")
_MODULES = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors", "[0-9]*_*/*.bin")


@dataclass(frozen=True)
class TokenizerFiles:
    """Where a tokenizer is read from: a folder, or a GGUF file in it."""

    folder: Path
    gguf: str | None = None

    @classmethod
    def beside(cls, model: Path) -> "TokenizerFiles":
        """Of a model folder or a ``.gguf`` file."""
        return cls(model.parent, model.name) if model.suffix == ".gguf" else cls(model)

    @property
    def exist(self) -> bool:
        """Whether there is a tokenizer; a folder of weights alone has none."""
        return self.gguf is not None or any((self.folder / name).exists() for name in _NAMES)

    @property
    def vocabulary(self) -> list[Path]:
        """Files of the vocabulary beside what every tokenizer of transformers writes, relative to the folder."""
        found = [] if self.gguf else [self.folder / name for name in _VOCABULARY]
        return [path.relative_to(self.folder) for path in found if path.is_file()]

    @property
    def around(self) -> list[Path]:
        """Files that say what surrounds the model, relative to the folder: what prepares images, and what is made of the
        states of a sentence encoder. Beside a GGUF file lies what belongs to others."""
        if self.gguf:
            return []
        found = [self.folder / name for name in (*_PROCESSOR, *_BESIDE_IT)]
        found += [path for pattern in (*_SENTENCES, *_MODULES) for path in sorted(self.folder.glob(pattern))]
        return [path.relative_to(self.folder) for path in found if path.is_file()]

    def load(self):
        """The tokenizer.

        Raises:
            CheckpointError: there is none that can be read.
        """
        if self.folder.is_dir() and not self.exist:  # for some families transformers makes up an empty one
            raise CheckpointError(f"there is no tokenizer in {self.folder}; put the tokenizer files beside the weights")
        options = {} if self.gguf is None else {"gguf_file": self.gguf}
        try:
            found = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False, **options)
        except Exception as error:  # a damaged file ends in whatever type the code that meets it raises, plain ones too
            raise CheckpointError(
                f"no tokenizer can be read from {self.folder / (self.gguf or '')}: {first_line(error)}; put the tokenizer "
                "files beside the weights"
            ) from error
        found.init_kwargs.pop("auto_map", None)  # to code that is not run, and not beside what is saved
        return found

    def load_image_processor(self):
        """The image processor.

        Raises:
            CheckpointError: there is none that can be read.
        """
        try:
            return AutoImageProcessor.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # a damaged file ends in whatever type the code that meets it raises
            raise CheckpointError(
                f"no image processor can be read from {self.folder}: {first_line(error)}; put the model's own "
                f"{_PROCESSOR[0]} beside the weights"
            ) from error

    def load_processor(self):
        """The processor of a model of images and text.

        Raises:
            CheckpointError: there is none that can be read.
            OptionError: it needs a package that is not installed.
        """
        try:
            found = AutoProcessor.from_pretrained(self.folder, trust_remote_code=False)
        except ImportError as error:  # torchvision for those that see films too, num2words for SmolVLM
            raise OptionError(
                f"the processor in {self.folder} needs a package that is not installed ({first_line(error)}); install it"
            ) from error
        except Exception as error:  # a damaged file ends in whatever type the code that meets it raises
            raise CheckpointError(
                f"no processor of images and text can be read from {self.folder}: {first_line(error)}; put the model's own "
                f"{' and '.join(_PROCESSOR)} beside the weights"
            ) from error
        if not hasattr(found, "image_processor"):  # transformers then gives the tokenizer, or whatever there is
            raise CheckpointError(
                f"there is no processor of images and text in {self.folder}; put the model's own {' and '.join(_PROCESSOR)} "
                "beside the weights"
            )
        return found
