"""A tokenizer as GGUF metadata, named as llama.cpp names them."""

import json
import re
import tempfile
from pathlib import Path

import gguf

from ..errors import UnsupportedModelError, option

SPACE = "\u2581"  # stands for a space in a token
SPLIT_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
BYTE = re.compile("<0x[0-9A-F]{2}>")

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before pairs of bytes are merged -> llama.cpp's name of it (src/llama-vocab.cpp).
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    ("gpt-2",): "gpt-2",
    ("digits", "gpt-2"): "smollm",
    (_LETTERS + r"\p{N}" + _REST,): "qwen2",
    (_LETTERS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
}


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer, vocabulary: int) -> None:
    """Tokens with their kinds, merges, how text is cut, special ids and the chat template.

    Args:
        tokenizer: of transformers; byte-level BPE, or BPE over characters with bytes for those it lacks
            (SentencePiece's form).
        vocabulary: rows of the embedding; ids that the tokenizer does not have are marked as unused.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind, or cuts text in a way that has no name here.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder, "tokenizer.json")
        facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        over_characters = _over_characters(facts)
        writer.add_tokenizer_model("llama" if over_characters else "gpt2")
        writer.add_tokenizer_pre("default" if over_characters else _pre_tokenizer(facts))
        tokens, kinds = _tokens(tokenizer, vocabulary)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        if over_characters:
            writer.add_token_scores(_scores(facts["model"]["merges"], tokens))
            writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith(SPACE))
        special = gguf.SpecialVocab(folder, load_merges=not over_characters, n_vocab=vocabulary)
        special.add_special_token |= _added_around(tokenizer)
        special.add_to_gguf(writer, quiet=True)


def _over_characters(facts: dict) -> bool:
    """Whether it merges characters, spaces among them as :data:`SPACE`, with a token for every byte."""
    model = facts.get("model", {})
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        return False
    steps = [facts.get(name) or {} for name in ("normalizer", "pre_tokenizer")]
    steps = [part for step in steps for part in step.get("normalizers", step.get("pretokenizers", [step])) if part]
    steps = [step for step in steps if step != SPLIT_AT_SPACES]  # which the normalizer has replaced
    known = {"Prepend": "prepend", "Replace": "content", "Metaspace": "replacement"}
    return bool(steps) and all(step.get(known.get(step["type"], "type")) == SPACE for step in steps)


def _scores(merges: list, tokens: list[str]) -> list[float]:
    """Of every token, so that the best pair is the one that is merged first; characters are no pairs."""
    made = [part if isinstance(part, list) else part.split(" ") for part in merges]
    ranks = {}
    for rank, (left, right) in enumerate(made):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(made))) for token in tokens]


def _pre_tokenizer(facts: dict) -> str:
    model, found = facts.get("model", {}), facts.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found]) if found else []
    stages = tuple(stage for step in steps for stage in _stages(step))
    if model.get("type") != "BPE" or model.get("byte_fallback") or stages not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the tokenizer ({model.get('type')}, cut by {stages or 'nothing'}) has no GGUF form: known are "
            f"SentencePiece's BPE and what llama.cpp calls {', '.join(PRE_TOKENIZERS.values())}; use "
            f"{option('format', 'stock')} and llama.cpp's converter"
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
        elif number == tokenizer.unk_token_id:
            kinds.append(kind.UNKNOWN)
        elif number in added:
            kinds.append(kind.CONTROL if added[number].special else kind.USER_DEFINED)
        elif BYTE.fullmatch(text[number]):
            kinds.append(kind.BYTE)
        else:
            kinds.append(kind.NORMAL)
    return tokens, kinds


def _added_around(tokenizer) -> dict[str, bool]:
    """Which special tokens the tokenizer puts before and after a text."""
    ids = tokenizer("a").input_ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {"bos": bos is not None and ids[0] == bos, "eos": eos is not None and len(ids) > 1 and ids[-1] == eos}
