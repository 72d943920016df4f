"""Chats with a model in the terminal, on a cluster of its own or a running server. /help lists commands and keys.

Ctrl-C stops an answer, Ctrl-D quits. Text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import termios
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import (
    Conversation,
    add_conversation_flags,
    add_place_flag,
    model_text,
    opening,
    reading_progress,
    request_with,
    server,
)
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult, plural
from outrider.orchestrator.pairing.tokenizer import TextStream
from outrider.protocol.errors import InvalidRequest, OutriderError, PromptTooLong, ServerStopped
from outrider.protocol.schema import Origin

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


PROMPT, NEXT_LINE, FENCE = "> ", "... ", '"""'


@dataclass(frozen=True, slots=True)
class UserInput:
    """One entered message; `is_command`: it addresses the program, not the model."""

    text: str
    is_command: bool


Reader = Callable[[], UserInput | None]
"""Returns the next message, or None at the end of the input. Raises KeyboardInterrupt for Ctrl-C, and InvalidRequest if
the message is not UTF-8."""


def read_line() -> UserInput | None:
    """Reads a line as one message."""
    try:
        line = input(PROMPT if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the message is not UTF-8 ({error.reason}); expected text in UTF-8") from None
    return UserInput(line, line.startswith("/"))


class Editor:
    """A line editor on stderr, whose history has the messages of earlier conversations."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output.vt100 import Vt100_Output
        from prompt_toolkit.shortcuts import CompleteStyle

        output = Vt100_Output.from_pty(sys.stderr, term=os.environ.get("TERM"))
        output.enable_cpr = False  # the query for the cursor's position, which only menus need
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=NEXT_LINE,
            history=_history(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_keys(),
            output=output,
        )

    def read(self) -> UserInput | None:
        attributes = termios.tcgetattr(sys.stdin)
        try:
            return entry_of(self._session.prompt(PROMPT))
        except EOFError:
            return None
        finally:  # a signal can end the session before it has restored the terminal
            termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)


def entry_of(typed: str) -> UserInput:
    """Parses an entry: a block becomes the text between its quotes; several lines are never a command."""
    text = typed.strip()
    if len(text) >= 2 * len(FENCE) and text.startswith(FENCE) and text.endswith(FENCE):
        return UserInput(text[len(FENCE) : -len(FENCE)].strip("\n"), False)
    return UserInput(typed, typed.startswith("/") and "\n" not in typed)


def is_open(typed: str) -> bool:
    """Returns whether a block has been started and not ended."""
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


def _history() -> History:
    """Returns a history in a file that only its owner can read, or in memory if there can be no file."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(home) / "outrider" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        say(f"Note: the history is not saved: {error}.")
        return InMemoryHistory()
    return FileHistory(path)


# Text in a terminal, coloured by the origin of its tokens.

ORIGINS = {
    Origin.PREPARED: ("\x1b[32m", "prepared branch"),
    Origin.DRAFTED: ("\x1b[36m", "drafted just in time"),
    Origin.HEAD: ("\x1b[35m", "drafted by a head"),
    Origin.COPIED: ("\x1b[33m", "copied from the text"),
    Origin.GUESSED: ("\x1b[34m", "sibling of a draft token"),
    Origin.TARGET: ("", "generated by the target"),
}
"""The colour of each origin, and what it is called."""
PLAIN = "\x1b[0m"


class Painter:
    """Colours the chunks of one answer. A character of several tokens has the colour of the last one."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.counts: Counter[Origin] = Counter()

    def of(self, chunk: Chunk) -> str:
        """Returns the chunk's text, coloured if the chunk has the origins of its tokens."""
        if not chunk.origins:
            return chunk.text
        self.counts.update(chunk.origins)
        pieces = [
            (origin, self._text.feed((token,)).text)
            for token, origin in zip(chunk.token_ids, chunk.origins, strict=True)
        ]
        runs = groupby(pieces, key=lambda piece: piece[0])
        return "".join(painted("".join(text for _, text in run), origin) for origin, run in runs)


def painted(text: str, origin: Origin) -> str:
    """Returns `text` in the colour of `origin`, followed by a reset of the colour."""
    colour, _ = ORIGINS[origin]
    return f"{colour}{text}{PLAIN}" if colour and text else text


def legend(counts: Counter[Origin] | None = None) -> str:
    """Formats the names of all origins in their colours, each after its number of tokens if there are `counts`."""
    named = ((origin, name if counts is None else f"{counts[origin]} {name}") for origin, (_, name) in ORIGINS.items())
    return ", ".join(painted(text, origin) for origin, text in named)


HELP = """\
/clear      forget the conversation, except for the system prompt
/undo       remove your last message and its answer
/save FILE  save the conversation; `--chat FILE` continues it
/quit       quit; so do /exit, /bye and Ctrl-D; Ctrl-C stops an answer

A pasted text is one message. Alt-Enter, or a backslash at the end of a line,
starts a new line; three double quotes start a block, three more end it.
Tab completes commands. To send text that begins with /, type a space first."""
COMMANDS = ("/clear", "/help", "/quit", "/save ", "/undo")
QUITS = ("/quit", "/exit", "/bye")
"""/quit, and its names in other chat programs."""
NO_TEMPLATE = "Note: this model has no chat template: it continues your text instead of answering."
SHOWN = 60
"""The most characters of a message that a note quotes."""


COMMON = (
    "--chat", "--system-prompt", "--colors", "--connect", "--model", "--draft-model", "--mode", "--max-tokens",
    "--temp", "--seed",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_conversation_flags(parser)
    parser.add_argument("--colors", action="store_true", help="colour tokens by their origin, such as draft or target")
    add_place_flag(parser)
    flags.add_sampling_flags(parser, ("logprobs",))
    flags.add_request_flags(parser)
    flags.add_cluster_flags(parser, flags.OF_MANY_REQUESTS)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    Chat(options).run()
    return 0


class Chat:
    """Runs the user's and the model's turns. In a terminal an error is printed and the conversation continues."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._conversation = Conversation(opening(options.system_prompt, options.chat))
        self._sampling = flags.sampling_of(options)
        self._text = model_text(options)
        self._screen = Screen()
        self._own_server = options.connect is None
        self._interactive = sys.stdin.isatty()
        self._reader: Reader | None = None
        self._unanswered = False
        self._context: int | None = None

    def run(self) -> None:
        """Runs turns until one of `QUITS` or the end of the input. The user may restart a server that has ended."""
        while True:
            with server(self._options, self._screen) as self._client:
                try:
                    self._take_turns()
                    return
                except ServerStopped as error:
                    if not self._wants_another_server(error):
                        raise

    def _take_turns(self) -> None:
        if self._reader is None:
            self._greet()
            self._reader = Editor(COMMANDS).read if self._interactive and sys.stderr.isatty() else read_line
        elif self._unanswered:
            self._guarded(self._answer)
        while (entry := self._guarded(self._reader, "\nCtrl-D or /quit quits.")) is not None:
            if entry.is_command and entry.text.strip() in QUITS:
                return
            self._guarded(partial(self._turn, entry))
        if self._interactive:
            say("")

    def _wants_another_server(self, error: ServerStopped) -> bool:
        """Asks whether to restart the server that this chat started; without a terminal it returns False."""
        if not self._interactive or not self._own_server:
            return False
        say(f"outrider chat: {error}")
        say("Start the server again and continue? [Y/n] ", end="")
        try:
            return sys.stdin.readline().strip().lower() in ("", "y", "yes")
        except KeyboardInterrupt:
            return False

    def _greet(self) -> None:
        if self._text.template is None:
            say(NO_TEMPLATE)
        if self._options.colors:
            say(f"Colours: {legend()}")
        if self._interactive:
            say("/help lists the commands and keys.")

    def _guarded(self, part: Callable[[], UserInput | None], interrupted: str = "[stopped]") -> UserInput | None:
        """Runs a part of a turn. In a terminal its errors are printed instead of raised, and it returns no text."""
        try:
            return part()
        except OutriderError as error:
            if not self._interactive or (self._own_server and isinstance(error, ServerStopped)):
                raise
            say(f"outrider chat: {error}")
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            say(interrupted)
        return UserInput("", False)

    def _turn(self, entry: UserInput) -> None:
        if not entry.is_command:
            if entry.text.strip():
                self._conversation.add("user", entry.text)
                self._answer()
            return
        command, _, rest = entry.text.strip().partition(" ")
        match command, rest.strip():
            case "/help", "":
                say(HELP)
            case "/clear", "":
                self._conversation.clear()
                say("The conversation is cleared.")
            case "/undo", "":
                text = self._conversation.undo()
                say("There is no message to remove." if text is None else f"Removed with its answer: {_short(text)}")
            case "/save", file if file:
                self._conversation.save(Path(file).expanduser())
                say(f"The conversation is saved to {file}.")
            case _:
                say(f"unknown command {entry.text.strip()!r} (see /help); to send it as text, start with a space")

    def _answer(self) -> None:
        """Runs the model's turn, until its end or Ctrl-C."""
        texts: list[str] = []
        self._unanswered = True
        try:
            status = self._stream(texts)
        except BaseException as error:
            if self._own_server and isinstance(error, ServerStopped):
                print(end="\n" if texts else "", flush=True)  # a restarted server receives the message again
            else:
                self._keep(texts)
            raise
        self._keep(texts)
        say(f"[{status}]")

    def _keep(self, texts: Sequence[str]) -> None:
        """Adds the received texts as the answer; without any, removes the user's message."""
        self._unanswered = False
        if texts:
            self._conversation.add("assistant", "".join(texts))
            print(flush=True)
        else:
            self._conversation.undo()
            say("There was no answer; your message was removed from the conversation.")

    def _stream(self, texts: list[str]) -> str:
        """Prints the answer, appends its pieces to `texts`, and returns the status line."""
        tokens, codec, sampling = self._fitting(), self._text.codec, self._sampling
        ends = frozenset[int]() if sampling.ignore_eos else codec.eos
        painter = Painter(TextStream(codec, tokens, sampling.stop, ends))
        stream = self._client.ask(request_with(self._options, tokens, sampling), reading_progress(self._screen))
        try:
            for chunk in stream:
                self._screen.clear()
                texts += [chunk.text] if chunk.text else []
                print(painter.of(chunk), end="", flush=True)
        except PromptTooLong:
            if not self._drop_oldest():
                raise
            return self._stream(texts)
        result = stream.result
        if result.finish_reason == "length" and len(result.token_ids) < sampling.max_tokens:
            self._context = result.prompt_tokens + len(result.token_ids)
        status = summary(result, sampling.max_tokens)
        return f"{status}\n {legend(painter.counts)}" if painter.counts else status

    def _fitting(self) -> tuple[int, ...]:
        """Returns the conversation's tokens; once the context has been full, with room for an answer."""
        while True:
            tokens = self._text.tokens(self._conversation.messages)
            room = 0 if self._context is None else min(self._sampling.max_tokens, self._context // 2)
            if self._context is None or len(tokens) + room <= self._context or not self._drop_oldest():
                return tokens

    def _drop_oldest(self) -> bool:
        """Removes the oldest message and its answer; returns False if only the newest message is left."""
        removed = self._conversation.drop_oldest()
        if removed is not None:
            say(f"Note: the context is full; your oldest message and its answer were removed: {_short(removed)}")
        return removed is not None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def summary(result: GenerationResult, max_tokens: int) -> str:
    """Formats an answer's length, speed, hits and cached prompt tokens in one line."""
    times = result.timings
    looked_up = times.cache_hits + times.cache_misses
    parts = [
        f"{plural(times.predicted_n, 'token')}, {times.predicted_per_second:.1f} tok/s",
        f"{times.cache_hits} hits of {looked_up}" if looked_up else result.mode,
        f"{times.cache_n} of {result.prompt_tokens} prompt tokens cached",
    ]
    if result.finish_reason != "length":
        return " | ".join(parts)
    full = plural(result.prompt_tokens + len(result.token_ids), "token")
    cut = len(result.token_ids) >= max_tokens
    ended = "cut off at --max-tokens" if cut else f"stopped: the context is full ({full}); /clear starts over"
    return " | ".join([ended, *parts])
