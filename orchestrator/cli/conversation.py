"""A conversation as a file keeps it, a JSON list of messages with `role` and `content`, and as it grows.

Knows who said what; knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.orchestrator.cli import text_file
from outrider.orchestrator.pair.chat import Message
from outrider.protocol.errors import InvalidRequest

EXPECTED = 'a JSON list like [{"role": "user", "content": "Hello"}]'


class Conversation:
    """What was said so far. What was there at the beginning in the system's name stays when the rest is dropped."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = list(messages)

    def say(self, text: str) -> None:
        """The user's turn."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The model's turn."""
        self.messages.append({"role": "assistant", "content": text})

    def undo(self) -> str | None:
        """Takes back the user's last message and what followed it; its text, or None when there was none."""
        turns = self._turns()
        return self._removed(turns[-1], len(self.messages)) if turns else None

    def drop_oldest(self) -> str | None:
        """Takes out the user's first message and what followed it; its text, or None when it is the only one."""
        turns = self._turns()
        return self._removed(turns[0], turns[1]) if len(turns) > 1 else None

    def _turns(self) -> list[int]:
        return [place for place, message in enumerate(self.messages) if message["role"] == "user"]

    def _removed(self, first: int, end: int) -> str:
        text = str(self.messages[first]["content"])
        del self.messages[first:end]
        return text

    def clear(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: Path) -> None:
        """Writes what `opening` reads.

        Raises:
            InvalidRequest: the file can't be written.
        """
        try:
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path} can't be written ({error.strerror}); expected another file") from None


def opening(system_prompt: str | None, path: Path | None) -> tuple[Message, ...]:
    """What stands before the user's next word: the system prompt, then the conversation in a file.

    Raises:
        InvalidRequest: the file can't be read or is no conversation, or both give a system prompt.
    """
    before: tuple[Message, ...] = ()
    if path is not None:
        before = _read(path)
    if system_prompt is None:
        return before
    if any(message["role"] == "system" for message in before):
        raise InvalidRequest(f"{path} already has a system prompt; leave out --system-prompt")
    return ({"role": "system", "content": system_prompt}, *before)


def checked(found: object, name: str) -> tuple[Message, ...]:
    """`found` as a conversation.

    Raises:
        InvalidRequest: it is none; `name` says whose.
    """
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{name} is not a conversation; expected {EXPECTED}")
    for number, message in enumerate(found, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidRequest(f"message {number} of {name} has no role or no text; expected {EXPECTED}")
    return tuple(found)


def _read(path: Path) -> tuple[Message, ...]:
    try:
        found = json.loads(text_file.read(path, EXPECTED))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} can't be read ({error}); expected {EXPECTED}") from None
    return checked(found, str(path))
