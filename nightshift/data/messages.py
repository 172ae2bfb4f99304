"""Prompts as rows hold them: text, a message list, or a message list with content parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class InvalidPromptError(ValueError):
    """A row has no usable prompt; the message says why, to follow "row 3: "."""


def normalise_prompt(value: Any) -> str | list[Message]:
    """A prompt as text or as a list of messages whose content is text.

    Content parts of type "text" are joined. Keys of a message that are null are left out: a parquet file gives each
    message the keys of all others.

    Raises:
        InvalidPromptError: null, empty, or of another form.
    """
    if value is None:
        raise InvalidPromptError("null")
    if isinstance(value, str):
        if not value.strip():
            raise InvalidPromptError("empty text")
        return value
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidPromptError(f"{type(value).__name__}, expected text or a list of messages")
    if not value:
        raise InvalidPromptError("empty list")
    messages = [_message(item, index) for index, item in enumerate(value)]
    if not any(message.get("content", "").strip() for message in messages):
        raise InvalidPromptError("messages without text")
    return messages


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Puts the text of each system turn before the text of the next user turn, for templates without a system role.

    Raises:
        InvalidPromptError: no user turn follows a system turn.
    """
    result: list[Message] = []
    held: list[str] = []
    for message in messages:
        if message["role"] == "system":
            held.append(message.get("content", ""))
        elif message["role"] == "user" and held:
            result.append({**message, "content": "\n\n".join([*held, message.get("content", "")])})
            held = []
        else:
            result.append(message)
    if held:
        raise InvalidPromptError("a system turn with no user turn after it, which cannot be folded")
    return result


def has_system(messages: Sequence[Message]) -> bool:
    """Whether a conversation has a system turn."""
    return any(message["role"] == "system" for message in messages)


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, Mapping):
        raise InvalidPromptError(f"message {index} is {type(item).__name__}, expected a map with role and content")
    message = {str(key): value for key, value in item.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPromptError(f"message {index} has no role")
    if "content" in message:
        message["content"] = _content(message["content"], index)
    elif "tool_calls" not in message:
        raise InvalidPromptError(f"message {index} has no content")
    return message


def _content(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidPromptError(f"content of message {index} is {type(content).__name__}, expected text or parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidPromptError(f"message {index} has a content part of type {kind!r}, expected text")
        texts.append(text)
    return "".join(texts)
