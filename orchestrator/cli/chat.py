"""Talks with a model in the terminal: with a cluster of its own, or with a running server. /help says the rest.

Ctrl-C stops an answer, Ctrl-D ends. Text goes to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import (
    Conversation,
    add_conversation_flags,
    add_place_flag,
    model_text,
    opening,
    server,
)
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.client.base_client import Stream
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult, plural
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pairing.tokenizer import ModelText
from outrider.protocol.errors import InvalidRequest, OutriderError, PromptTooLong, ServerStopped
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Origin

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
        attributes = termios.tcgetattr(sys.stdin)
        try:
            return entry_of(self._session.prompt(PROMPT))
        except EOFError:
            return None
        finally:  # a signal can end the session before it has restored the terminal
            termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)


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


# Text coloured by where its tokens came from, for a terminal.

COLOURS = {
    Origin.PREPARED: "\x1b[32m",
    Origin.DRAFTED: "\x1b[36m",
    Origin.HEAD: "\x1b[35m",
    Origin.COPIED: "\x1b[33m",
    Origin.GUESSED: "\x1b[34m",
    Origin.TARGET: "",
}
WORDS = {
    Origin.PREPARED: "prepared branch",
    Origin.DRAFTED: "drafted just in time",
    Origin.HEAD: "drafted by a head",
    Origin.COPIED: "copied from the text",
    Origin.GUESSED: "sibling of a draft token",
    Origin.TARGET: "generated by the target",
}
PLAIN = "\x1b[0m"


class Painter:
    """One answer's chunks, coloured. A character of several tokens has the colour of its last."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.counts: Counter[Origin] = Counter()

    def of(self, chunk: Chunk) -> str:
        """The chunk's text, in colours if it tells where its tokens came from."""
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
    """`text` in the colour of `origin`, in which nothing after it is written."""
    colour = COLOURS[origin]
    return f"{colour}{text}{PLAIN}" if colour and text else text


def legend() -> str:
    return ", ".join(painted(words, origin) for origin, words in WORDS.items())


def counted(counts: Counter[Origin]) -> str:
    """How many tokens came from where."""
    return ", ".join(painted(f"{counts[origin]} {words}", origin) for origin, words in WORDS.items())


HELP = """\
/clear      forget the conversation, but for the system prompt
/undo       remove your last message and its answer
/save FILE  write the conversation, for `--chat FILE`
/quit       quit, as /exit, /bye and Ctrl-D do; Ctrl-C stops an answer

A pasted text is one message. Alt-Enter, or a backslash at the end of a line,
starts another line; three double quotes start a block, three more end it.
Tab completes commands; a space before a / makes it text."""
COMMANDS = ("/clear", "/help", "/quit", "/save ", "/undo")
QUITS = ("/quit", "/exit", "/bye")
"""The names that other chats have for it."""
NO_TEMPLATE = "Note: this model has no chat template: it continues your text instead of answering."
SHOWN = 60
"""Characters of a message that are enough to know it by."""
Ask = Callable[[tuple[int, ...]], Stream]


COMMON = (
    "--chat", "--system-prompt", "--colors", "--connect", "--model", "--draft-model", "--mode", "--max-tokens",
    "--temp", "--seed",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_conversation_flags(parser)
    parser.add_argument("--colors", action="store_true", help="colour tokens by where they came from")
    add_place_flag(parser)
    flags.add_sampling_flags(parser, ("logprobs",))
    flags.add_request_flags(parser)
    flags.add_cluster_flags(parser, flags.OF_MANY_REQUESTS)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    said, sampling = Conversation(opening(options.system_prompt, options.chat)), flags.sampling_of(options)
    text, screen = model_text(options), Screen()
    chat = Chat(said, text, sampling, screen, own_server=options.connect is None)
    while True:
        with server(options, screen) as client:
            ask = partial(
                client.stream,
                sampling=sampling,
                mode=options.mode or "auto",
                num_draft_tokens=options.num_draft_tokens,
                branches=options.branches,
                drafter=options.drafter or "",
                origins=options.colors,
                progress=lambda done, total: screen.show(f"reading the prompt: {done} of {total} tokens"),
            )
            try:
                chat.run(ask, options.colors)
                return 0
            except ServerStopped as error:
                if not chat.wants_another_server(error):
                    raise


class Chat:
    """The user's turns and the model's. On a terminal an error is told and the conversation goes on."""

    def __init__(
        self, said: Conversation, text: ModelText, sampling: SamplingParams, screen: Screen, own_server: bool
    ) -> None:
        self._said = said
        self._text = text
        self._sampling = sampling
        self._screen = screen
        self._own_server = own_server
        self._person = sys.stdin.isatty()
        self._reader: InputReader | None = None
        self._unanswered = False
        self._context: int | None = None

    def run(self, ask: Ask, colours: bool) -> None:
        """Until one of `QUITS`, or nothing more is said.

        Raises:
            ServerStopped: the server of this chat has ended; with another one it goes on where it was.
        """
        self._ask = ask
        if self._reader is None:
            self._greet(colours)
            self._reader = reader(COMMANDS)
        elif self._unanswered:
            self._guarded(self._answer)
        while (entry := self._heard(self._reader)) is not None:
            if entry.is_command and entry.text.strip() in QUITS:
                return
            self._guarded(partial(self._turn, entry))

    def wants_another_server(self, error: ServerStopped) -> bool:
        """Whether the user wants the server of this chat started again; where there is no person nobody is asked."""
        if not self._person or not self._own_server:
            return False
        say(f"outrider chat: {error}")
        say("Start the server again and go on? [Y/n] ", end="")
        try:
            return sys.stdin.readline().strip().lower() in ("", "y", "yes")
        except KeyboardInterrupt:
            return False

    def _greet(self, colours: bool) -> None:
        if self._text.template is None:
            say(NO_TEMPLATE)
        if colours:
            say(f"Colours: {legend()}")
        if self._person:
            say("/help lists the commands and keys.")

    def _guarded(self, turn: Callable[[], None]) -> None:
        """A turn that may fail: a person is told, and goes on."""
        try:
            turn()
        except OutriderError as error:
            if not self._person or (self._own_server and isinstance(error, ServerStopped)):
                raise
            say(f"outrider chat: {error}")
        except KeyboardInterrupt:
            if not self._person:
                raise
            say("[stopped]")

    def _heard(self, source: InputReader) -> UserInput | None:
        """The user's next message; None at the end."""
        try:
            entry = source.read()
        except KeyboardInterrupt:
            if not self._person:
                raise
            say("\nCtrl-D or /quit quits.")
            return UserInput("", False)
        except UnicodeDecodeError as error:
            refused = InvalidRequest(f"the message is not UTF-8 ({error.reason}); expected text")
            if not self._person:
                raise refused from None
            say(f"outrider chat: {refused}")
            return UserInput("", False)
        if entry is None and self._person:
            say("")
        return entry

    def _turn(self, entry: UserInput) -> None:
        if not entry.is_command:
            if entry.text.strip():
                self._said.add_user(entry.text)
                self._answer()
            return
        command, _, rest = entry.text.strip().partition(" ")
        match command, rest.strip():
            case "/help", "":
                say(HELP)
            case "/clear", "":
                self._said.clear()
                say("The conversation is cleared.")
            case "/undo", "":
                gone = self._said.undo()
                say("There is no message to remove." if gone is None else f"Removed with its answer: {_short(gone)}")
            case "/save", file if file:
                self._said.save(Path(file).expanduser())
                say(f"The conversation is saved to {file}.")
            case _:
                say(f"unknown command {entry.text.strip()!r} (see /help); to send it as text, start with a space")

    def _answer(self) -> None:
        """The model's turn, as far as the user lets it come."""
        told: list[str] = []
        self._unanswered = True
        try:
            status = self._streamed(told)
        except BaseException as error:
            if self._own_server and isinstance(error, ServerStopped):
                print(end="\n" if told else "", flush=True)  # the message is asked anew if there is another server
            else:
                self._keep(told)
            raise
        self._keep(told)
        say(f"[{status}]")

    def _keep(self, told: Sequence[str]) -> None:
        """What came becomes the answer; a message without any is removed."""
        self._unanswered = False
        if told:
            self._said.add_answer("".join(told))
            print(flush=True)
        else:
            self._said.undo()
            say("No answer came; your message was removed from the conversation.")

    def _streamed(self, told: list[str]) -> str:
        """The answer's texts, into `told` and onto the screen; and what to say of it."""
        while True:
            tokens = self._fitting()
            try:
                return self._asked(tokens, told)
            except PromptTooLong:
                if not self._dropped():
                    raise

    def _asked(self, tokens: tuple[int, ...], told: list[str]) -> str:
        codec, sampling = self._text.codec, self._sampling
        ends = frozenset[int]() if sampling.ignore_eos else codec.eos
        painter = Painter(TextStream(codec, tokens, sampling.stop, ends))
        stream = self._ask(tokens)
        for chunk in stream:
            self._screen.clear()
            told += [chunk.text] if chunk.text else []
            print(painter.of(chunk), end="", flush=True)
        result = stream.result
        if result.finish_reason == "length" and len(result.token_ids) < sampling.max_tokens:
            self._context = result.prompt_tokens + len(result.token_ids)
        status = summary(result, sampling.max_tokens)
        return f"{status}\n {counted(painter.counts)}" if painter.counts else status

    def _fitting(self) -> tuple[int, ...]:
        """The conversation's tokens; where the context was full before, with room for an answer."""
        while True:
            tokens = self._text.tokens(self._said.messages)
            room = 0 if self._context is None else min(self._sampling.max_tokens, self._context // 2)
            if self._context is None or len(tokens) + room <= self._context or not self._dropped():
                return tokens

    def _dropped(self) -> bool:
        """Makes room: takes the oldest message and its answer out; False when only the newest is left."""
        gone = self._said.drop_oldest()
        if gone is not None:
            say(f"Note: the context is full; your oldest message and its answer were removed: {_short(gone)}")
        return gone is not None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def summary(result: GenerationResult, max_tokens: int) -> str:
    """An answer in one line: how long, how fast, what speculation and the prompt cache did for it."""
    times = result.timings
    looked_up = times.cache_hits + times.cache_misses
    words = [
        f"{plural(times.predicted_n, 'token')}, {times.predicted_per_second:.1f} tok/s",
        f"{times.cache_hits} hits of {looked_up}" if looked_up else result.mode,
        f"{times.cache_n} of {result.prompt_tokens} prompt tokens cached",
    ]
    if result.finish_reason != "length":
        return " | ".join(words)
    full = plural(result.prompt_tokens + len(result.token_ids), "token")
    cut = len(result.token_ids) >= max_tokens
    ended = "cut off at --max-tokens" if cut else f"stopped: the context is full ({full}); /clear starts over"
    return " | ".join([ended, *words])
