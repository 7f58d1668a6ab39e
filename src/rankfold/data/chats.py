"""Chats as documents: rows of turns that the chat template of a model writes out as text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DataError, OptionError, first_line

CHATS = ("messages", "conversations")  # columns of chats: of role and content, and of ShareGPT's from and value
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its speakers -> roles; all other names are roles


@dataclass(frozen=True)
class Chat:
    """Turns of one conversation, as a chat template takes them."""

    turns: tuple[dict[str, Any], ...]
    where: str  # for messages

    def __len__(self) -> int:
        """Count the characters of all turns."""
        return sum(len(turn.get("content") or "") for turn in self.turns)


def column_read(columns: Iterable[str], column: str) -> str:
    """Return the column that a row is read from: a chat, where the usual column is missing."""
    found = set(columns)
    chats = [name for name in CHATS if name in found]
    return chats[0] if column == "text" and column not in found and chats else column


def is_chat(value: Any) -> bool:
    """Whether a value looks like the turns of a chat."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def chat_of(turns: list[Mapping], where: str) -> Chat:
    """Read the turns of a chat.

    Raises:
        DataError: a turn names no role, or has something else than text.
    """
    return Chat(tuple(_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)), where)


def _turn(turn: Mapping, where: str) -> dict[str, Any]:
    """Return a turn with the keys of a chat template; keys that only other turns of a table have are left out."""
    given = {key: value for key, value in turn.items() if value is not None}
    if "role" not in given and isinstance(given.get("from"), str):
        given = {"role": SHAREGPT.get(given["from"], given["from"]), "content": given.get("value")}
    if not isinstance(given.get("role"), str):
        raise DataError(
            f"{where} has no role; a turn has 'role' and 'content', or 'from' and 'value', "
            f"got {', '.join(map(repr, turn))}"
        )
    content = _content(given.get("content"), where)
    if content is None and "tool_calls" not in given:
        raise DataError(f"{where} has no content; take the turn out, or give it a text")
    return given | {"content": content}


def _content(content: Any, where: str) -> str | None:
    """Return the text of a turn, which may be a list of parts; a turn that only calls tools has none."""
    if is_chat(content) and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    if is_chat(content):
        raise DataError(
            f"{where} has a part that is not text; take it out, or give image-text examples (docs/vision.md)"
        )
    if not isinstance(content, str | None):
        raise DataError(f"{where}: the content holds {type(content).__name__}, not text")
    return content


def written(document: str | Chat, tokenizer, model: str) -> str:
    """Write a document as text; a chat by the chat template of the model.

    Args:
        document: a text, or a chat.
        tokenizer: of the model.
        model: its name, for messages.

    Raises:
        DataError: the tokenizer has no chat template, or the template does not take the chat.
    """
    if isinstance(document, str):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{document.where} is a chat, and the tokenizer of {model} has no chat template; give rows with a column "
            "of text, or put the chat_template.jinja of the model next to its tokenizer files"
        )
    try:
        text = tokenizer.apply_chat_template(list(document.turns), tokenize=False)
    except ImportError as error:
        raise OptionError(
            f"chat templates need a package that is not installed ({first_line(error)}); install it"
        ) from error
    except Exception as error:  # a template is a program of its author and raises whatever it likes
        raise DataError(
            f"{document.where}: the chat template of {model} does not take this chat ({first_line(error)}); correct or "
            "remove the row"
        ) from error
    if has_half_character(text):
        raise DataError(f"{document.where} has half a character (a lone surrogate) in it; write the file as UTF-8")
    return text


def has_half_character(text: str) -> bool:
    """Whether a text has a lone surrogate, which no encoding of text can hold."""
    return any("\ud800" <= character <= "\udfff" for character in text)
