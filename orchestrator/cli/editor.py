"""What a person says, typed at a terminal or read from a pipe, a message at a time. Knows keys, and no conversations.

On a terminal a pasted text is one message, whatever lines it has; Alt-Enter, or a backslash at the end of a line,
begins another line, and three double quotes begin a block that ends with three more. A pipe has a message a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outrider.orchestrator.cli.terminal import say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, NEXT_LINE, FENCE = "> ", "... ", '"""'


@dataclass(frozen=True, slots=True)
class UserInput:
    """A message as it was entered; `is_command`: it is for the program and not for the model."""

    text: str
    is_command: bool


class InputReader(Protocol):
    def read(self) -> UserInput | None:
        """The next message; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            UnicodeDecodeError: it is not UTF-8.
        """


def reader(commands: Sequence[str]) -> InputReader:
    """An editor where stdin and stderr are a terminal, else plain lines; `commands` are completed."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        return Editor(commands)
    return LineReader(PROMPT if sys.stdin.isatty() else "")


class LineReader:
    """A message a line, as it comes."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def read(self) -> UserInput | None:
        try:
            line = input(self._prompt)
        except EOFError:
            return None
        return UserInput(line, line.startswith("/"))


class Editor:
    """An editor on stderr, with the messages of earlier conversations in its history."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output.vt100 import Vt100_Output
        from prompt_toolkit.shortcuts import CompleteStyle

        output = Vt100_Output.from_pty(sys.stderr, term=os.environ.get("TERM"))
        output.enable_cpr = False  # asks the terminal where its cursor is, which only menus need
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=NEXT_LINE,
            history=_history(),
            completer=_completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_keys(),
            output=output,
        )

    def read(self) -> UserInput | None:
        try:
            return entry_of(self._session.prompt(PROMPT))
        except EOFError:
            return None


def entry_of(typed: str) -> UserInput:
    """A block stands for the text between its quotes; of several lines none is a command."""
    text = typed.strip()
    if len(text) >= 2 * len(FENCE) and text.startswith(FENCE) and text.endswith(FENCE):
        return UserInput(text[len(FENCE) : -len(FENCE)].strip("\n"), False)
    return UserInput(typed, typed.startswith("/") and "\n" not in typed)


def is_open(typed: str) -> bool:
    """Whether a block was begun and not ended."""
    return typed.lstrip().startswith(FENCE) and typed.count(FENCE) % 2 == 1


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(commands: Sequence[str]) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            typed = document.text_before_cursor
            if typed.startswith("/"):
                yield from (Completion(one, -len(typed)) for one in commands if one.startswith(typed))

    return Commands()


def _history() -> History:
    """A file that only its owner reads; without one the history ends with the program."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        say(f"Note: the history is not kept: {error}.")
        return InMemoryHistory()
    return FileHistory(path)


def history_file() -> Path:
    """Where what was typed is kept."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "outrider" / "chat_history"
