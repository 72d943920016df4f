"""Talks with a model in the terminal: with a cluster of its own, or with a running server. /help says the rest.

Ctrl-C stops an answer, Ctrl-D ends. Text goes to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.conversation import Conversation, opening
from outrider.orchestrator.cli.generate import add_conversation_flags, add_place_flag, model_text, server
from outrider.orchestrator.cli.paint import Painter, counted, legend
from outrider.orchestrator.cli.screen import Screen, say
from outrider.orchestrator.client.asker import Stream
from outrider.orchestrator.client.result import GenerationResult
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pair.model_text import ModelText
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams

HELP = """\
/clear      forget what was said, but for the system prompt
/undo       take your last turn back, and its answer
/save FILE  write the conversation, for `--chat FILE`
/quit       end, as Ctrl-D does; Ctrl-C stops an answer"""
NO_TEMPLATE = "Note: no chat template is used: what was said is one text, which the model goes on with."
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
        Chat(said, ask, text, sampling, screen).run(options.colors)
    return 0


class Chat:
    """The user's turns and the model's. On a terminal an error is told and the conversation goes on."""

    def __init__(self, said: Conversation, ask: Ask, text: ModelText, sampling: SamplingParams, screen: Screen) -> None:
        self._said = said
        self._ask = ask
        self._text = text
        self._sampling = sampling
        self._screen = screen
        self._person = sys.stdin.isatty()

    def run(self, colours: bool) -> None:
        """Until /quit, or nothing more is said."""
        if self._text.template is None:
            say(NO_TEMPLATE)
        if colours:
            say(f"Colours: {legend()}")
        if self._person:
            say("/help lists the commands.")
            with suppress(ImportError):
                import_module("readline")  # `input` edits lines and remembers them once it is there
        while (line := self._heard()) is not None:
            try:
                if not self._turn(line):
                    return
            except OutriderError as error:
                if not self._person:
                    raise
                say(f"outrider chat: {error}")
            except KeyboardInterrupt:
                if not self._person:
                    raise
                say("[stopped]")

    def _heard(self) -> str | None:
        """The user's next line; None at the end."""
        try:
            return input("> " if self._person else "")
        except EOFError:
            if self._person:
                say("")
            return None
        except KeyboardInterrupt:
            if not self._person:
                raise
            say("\nCtrl-D or /quit ends.")
            return ""
        except UnicodeDecodeError as error:
            refused = InvalidRequest(f"what was said is not UTF-8 ({error.reason}); expected text")
            if not self._person:
                raise refused from None
            say(f"outrider chat: {refused}")
            return ""

    def _turn(self, line: str) -> bool:
        """False when the user wants no more."""
        if not line.startswith("/"):
            if line.strip():
                self._said.say(line)
                self._answer()
            return True
        command, _, rest = line.strip().partition(" ")
        match command, rest.strip():
            case "/quit", "":
                return False
            case "/help", "":
                say(HELP)
            case "/clear", "":
                self._said.clear()
            case "/undo", "":
                say("taken back" if self._said.undo() else "there is nothing to take back")
            case "/save", file if file:
                self._said.save(Path(file).expanduser())
                say(f"saved to {file}")
            case _:
                say(f"there is no command {line.strip()!r}; /help lists them, and a space before it says it")
        return True

    def _answer(self) -> None:
        """The model's turn, as far as the user lets it come; a turn without any answer is taken back."""
        told: list[str] = []
        try:
            status = self._streamed(told)
        finally:
            if told:
                self._said.answer("".join(told))
                print(flush=True)
            else:
                self._said.undo()
                say("Note: there was no answer, so your turn is taken back.")
        say(f"[{status}]")

    def _streamed(self, told: list[str]) -> str:
        """The answer's texts, into `told` and onto the screen; and what to say of it."""
        tokens = self._text.tokens(self._said.messages)
        codec, sampling = self._text.codec, self._sampling
        ends = frozenset[int]() if sampling.ignore_eos else codec.eos
        painter = Painter(TextStream(codec, tokens, sampling.stop, ends))
        stream = self._ask(tokens)
        for chunk in stream:
            self._screen.clear()
            told += [chunk.text] if chunk.text else []
            print(painter.of(chunk), end="", flush=True)
        status = summary(stream.result)
        return f"{status}\n {counted(painter.counts)}" if painter.counts else status


def summary(result: GenerationResult) -> str:
    """An answer in one line: how long, how fast, what speculation and the prompt cache did for it."""
    times = result.timings
    looked_up = times.cache_hits + times.cache_misses
    words = [
        f"{times.predicted_n} tokens, {times.predicted_per_second:.1f} tok/s",
        f"{times.cache_hits} hits of {looked_up}" if looked_up else result.mode,
        f"{times.cache_n} of {result.prompt_tokens} prompt tokens cached",
        *(["cut at --max-tokens"] if result.finish_reason == "length" else []),
    ]
    return " | ".join(words)
