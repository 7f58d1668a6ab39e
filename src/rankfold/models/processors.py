"""What makes the inputs of a model: its tokenizer, its image processor, or both in one."""

from ..errors import CheckpointError
from .tokenizer import TokenizerFiles


class Processors:
    """Read from beside the weights when they are wanted.

    Args:
        name: of the model, for messages.
        files: where they lie; ``None`` where there are none.
        tokenizer: in place of the one that lies there, or a processor that has one.

    Raises:
        CheckpointError: when one is asked for that is not there.
    """

    def __init__(self, name: str, files: TokenizerFiles | None = None, tokenizer=None):
        self.name, self.files, self._tokenizer = name, files, getattr(tokenizer, "tokenizer", tokenizer)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to use and to save."""
        return self._tokenizer is not None or (self.files is not None and self.files.exist)

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            self._tokenizer = self._found("a tokenizer", "pass token ids instead of text").load()
        return self._tokenizer

    @property
    def image_processor(self):
        """What makes pixels of images.

        Raises:
            OptionError: it needs a package that is not installed.
        """
        return self._found("an image processor", "pass one as tokenizer, or pixels").load_image_processor()

    @property
    def processor(self):
        """What makes the inputs of a model of images and text.

        Raises:
            OptionError: it needs a package that is not installed.
        """
        return self._found("a processor", "pass one as tokenizer").load_processor()

    def _found(self, what: str, advice: str) -> TokenizerFiles:
        if self.files is None:
            raise CheckpointError(f"{self.name} came without {what}; {advice}")
        return self.files
