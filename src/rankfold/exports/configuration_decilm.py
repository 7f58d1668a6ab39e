"""Config of a DeciLM folder: Llama's, with what differs from block to block. It is written beside the weights."""

from types import SimpleNamespace

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    """``block_configs`` as engines read them, by attribute."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **kwargs):
        super().__init__(**kwargs)
        parts = [{name: SimpleNamespace(**part) for name, part in block.items()} for block in block_configs or []]
        self.block_configs = [SimpleNamespace(**block) for block in parts]

    def to_dict(self):
        """The config as JSON has it."""
        blocks = [{name: dict(vars(part)) for name, part in vars(block).items()} for block in self.block_configs]
        plain = LlamaConfig.from_dict({key: value for key, value in vars(self).items() if key != "block_configs"})
        return plain.to_dict() | {"model_type": self.model_type, "block_configs": blocks}
