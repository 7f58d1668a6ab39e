"""A tokenizer as GGUF metadata, named as llama.cpp names them."""

import json
import tempfile
from pathlib import Path

import gguf

from ..errors import UnsupportedModelError

__all__ = ["write_tokenizer"]

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before pairs of bytes are merged -> llama.cpp's name of it (src/llama-vocab.cpp).
PRE_TOKENIZERS = {
    ("gpt-2",): "gpt-2",
    ("digits", "gpt-2"): "smollm",
    (_LETTERS + r"\p{N}" + _REST,): "qwen2",
    (_LETTERS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
}


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer, vocabulary: int) -> None:
    """Tokens with their kinds, merges, how text is cut, special ids and the chat template.

    Args:
        tokenizer: a byte-level BPE tokenizer of transformers.
        vocabulary: rows of the embedding; ids that the tokenizer does not have are marked as unused.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind, or cuts text in a way that has no name here.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder, "tokenizer.json")
        facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(facts))
        tokens, kinds = _tokens(tokenizer, vocabulary)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocabulary)
        special.add_special_token |= _added_around(tokenizer)
        special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(facts: dict) -> str:
    model, found = facts.get("model", {}), facts.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found]) if found else []
    stages = tuple(stage for step in steps for stage in _stages(step))
    if model.get("type") != "BPE" or model.get("byte_fallback") or stages not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the tokenizer ({model.get('type')}, cut by {stages or 'nothing'}) has no GGUF form here: known are byte-level "
            f"ones that llama.cpp calls {', '.join(PRE_TOKENIZERS.values())}; use --format stock and llama.cpp's own converter"
        )
    return PRE_TOKENIZERS[stages]


def _stages(step: dict) -> list[str]:
    """One step of ``pre_tokenizer`` in tokenizer.json, as the keys above have it."""
    if step["type"] == "ByteLevel":
        return ["gpt-2"] if step.get("use_regex", True) else []
    if step["type"] == "Digits" and step.get("individual_digits"):
        return ["digits"]
    if step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return [step["pattern"].get("Regex", "")]
    return [step["type"]]


def _tokens(tokenizer, vocabulary: int) -> tuple[list[str], list[int]]:
    """Text and kind of every id."""
    text = {number: token for token, number in tokenizer.get_vocab().items()}
    added, kind = tokenizer.added_tokens_decoder, gguf.TokenType
    tokens, kinds = [], []
    for number in range(vocabulary):
        tokens.append(text.get(number, f"[PAD{number}]"))
        if number not in text:
            kinds.append(kind.UNUSED)
        elif number in added:
            kinds.append(kind.CONTROL if added[number].special else kind.USER_DEFINED)
        else:
            kinds.append(kind.NORMAL)
    return tokens, kinds


def _added_around(tokenizer) -> dict[str, bool]:
    """Which special tokens the tokenizer puts before and behind a text."""
    ids = tokenizer("a").input_ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {"bos": bos is not None and ids[0] == bos, "eos": eos is not None and len(ids) > 1 and ids[-1] == eos}
