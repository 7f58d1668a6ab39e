"""A tiny model on disk with a real tokenizer, as a user would have one."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers as t
from tokenizers import ByteLevelBPETokenizer

from rankfold.files import write_text


def save_tiny(folder: Path, blocks: int = 4, **options) -> Path:
    """A random Llama of a few blocks and its tokenizer in ``folder``."""
    torch.manual_seed(0)
    config = t.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=400,
        max_position_embeddings=128,
        **options,
    )
    model = t.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([topics["integers"], topics["class"]], vocab_size=380, special_tokens=["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


def save_text(path: Path, copies: int = 1) -> Path:
    """Some English in a file."""
    write_text(path, "\n".join(topics[key] for key in ("class", "integers", "operator-summary", "for")) * copies)
    return path
