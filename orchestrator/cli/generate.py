"""Completes a prompt, on a running server or a cluster that it starts, and streams the text to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.client.client import BaseClient, Client, Resumed
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.client.dialogue import EMPTY_PROMPT, GenerationResult, Prompt, generate_message, pluralize
from outrider.orchestrator.machine.system import require_mlx
from outrider.orchestrator.pairing.chat_template import Message
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.orchestrator.settings import ServeSettings, flag_of
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import EndpointError, InvalidRequest, ModelError
from outrider.protocol.messages import Generate
from outrider.protocol.sampling import SamplingParams

EXPECTED_CHAT = 'a JSON list like [{"role": "user", "content": "Hello"}]'

FAILOVER_SECONDS = 1.0
"""How long a server may be silent before the next one is tried."""

REQUEST_SETTINGS = ("mode", "num_draft_tokens", "branches", "log_level", "log_format", "keys")
"""Cluster settings that also concern a request to a running server."""

COMMON = (
    "--prompt", "--chat", "--system-prompt", "--json", "--connect", "--model", "--draft-model", "--mode",
    "--max-tokens", "--temp", "--seed", "--stop", "--json-schema",
)  # fmt: skip


class Conversation:
    """The messages so far, with `role` and `content`. System messages stay when others are removed."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = list(messages)

    def add(self, role: str, text: str) -> None:
        """Appends a message of the user (role `user`) or of the model (role `assistant`)."""
        self.messages.append({"role": role, "content": text})

    def undo(self) -> str | None:
        """Removes the user's last message and everything after it; returns its text, or None if there was none."""
        turns = self._user_turns()
        return self._remove(turns[-1], len(self.messages)) if turns else None

    def drop_oldest(self) -> str | None:
        """Removes the user's first message and its answer; returns its text, or None if it is the only one."""
        turns = self._user_turns()
        return self._remove(turns[0], turns[1]) if len(turns) > 1 else None

    def _user_turns(self) -> list[int]:
        return [place for place, message in enumerate(self.messages) if message["role"] == "user"]

    def _remove(self, first: int, end: int) -> str:
        text = str(self.messages[first]["content"])
        del self.messages[first:end]
        return text

    def clear(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: Path) -> None:
        """Writes the file that `load_messages` reads. Raises InvalidRequest if the file can't be written."""
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        try:
            real = path.expanduser().resolve()
            real.parent.stat()  # no folder is created
            if real.exists() and not real.is_file():
                raise OSError("it is not a file")  # replacing a pipe or a device would remove it
            mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else 0o666
            replace_file(real, text, mode)  # an earlier conversation stays if this one doesn't fit on the disk
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"{path} can't be written ({why}); choose another file") from None


def load_messages(system_prompt: str | None, path: Path | None) -> tuple[Message, ...]:
    """Returns the messages that precede the user's next one: the system prompt, then the conversation in a file.

    Raises:
        InvalidRequest: the file can't be read or holds no conversation, or both give a system prompt.
    """
    before: tuple[Message, ...] = ()
    if path is not None:
        try:
            before = as_chat(json.loads(flags.read_text_file(path, EXPECTED_CHAT)), str(path))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path} can't be read ({error}); expected {EXPECTED_CHAT}") from None
    if system_prompt is None:
        return before
    if any(message["role"] == "system" for message in before):
        raise InvalidRequest(f"{path} already has a system prompt; leave out --system-prompt")
    return ({"role": "system", "content": system_prompt}, *before)


def as_chat(found: object, name: str) -> tuple[Message, ...]:
    """Returns `found` if it is a conversation, else raises InvalidRequest; `name` is the file in the error message."""
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{name} is not a conversation; expected {EXPECTED_CHAT}")
    for number, message in enumerate(found, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidRequest(f"message {number} of {name} has no role or no text; expected {EXPECTED_CHAT}")
    return tuple(found)


def add_flags(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group()
    text = "the text to complete; - reads it from stdin"
    given.add_argument("prompt", nargs="?", default=argparse.SUPPRESS, metavar="PROMPT", help=text)
    flag = "PROMPT as a flag, for text that may begin with a dash (default: none)"
    given.add_argument("--prompt", "-p", metavar="PROMPT", help=flag)
    add_conversation_flags(parser)
    add_connect_flags(parser)
    flags.add_sampling_flags(parser)
    flags.add_request_flags(parser)
    flags.add_cluster_flags(parser, (*flags.MULTI_REQUEST_SETTINGS, "prompt_cache"))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    screen = Screen()
    if options.logprobs is not None and not options.json:
        raise InvalidRequest("--logprobs needs --json")
    prompt = prompt_of(options)
    given = prompt if isinstance(prompt, str) else load_model_codec(options).encode_prompt(prompt)
    request = request_with(options, given, SamplingParams(**flags.given_sampling(options)))
    result = _complete(options, request, screen)
    if options.json:
        print(json.dumps(as_json(result, request, prompt)))
    else:
        say(result.summary())
        if result.finish_reason == "length":
            say(f"Note: the text was {explain_cut_off(result, request.sampling.max_tokens)}")
    return 0


def explain_cut_off(result: GenerationResult, max_tokens: int) -> str:
    """Says why the text ended before the model ended it."""
    if len(result.token_ids) >= max_tokens:
        return f"cut off after {pluralize(max_tokens, 'token')} (--max-tokens)"
    return f"cut off because the context is full ({pluralize(result.prompt_tokens + len(result.token_ids), 'token')})"


def add_conversation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the conversation before the prompt, also for `chat`."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system-prompt", metavar="TEXT", help="the system prompt (default: none)")
    before = "continue this conversation, a JSON list of messages with role and content (default: none)"
    group.add_argument("--chat", type=Path, metavar="FILE", help=before)
    group.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as plain text")


def add_connect_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    there = "use a running server, or several (A,B): if one is lost, the next continues (default: start a cluster)"
    group.add_argument("--connect", metavar="ENDPOINT", help=there)
    add_server_key_flag(group.add_argument)


def add_server_key_flag(add: Callable[..., object]) -> None:
    key = "the key that the server at --connect prints (default: the one that `outrider keys trust` saved)"
    add("--server-key", metavar="KEY", help=key)


def _complete(options: argparse.Namespace, request: Generate, screen: Screen) -> GenerationResult:
    """Runs one request on the server that the flags name, or on a new cluster; prints its text unless --json is set."""
    with open_client(options, screen) as client:
        stream, printed = client.ask(request, reading_progress(screen)), ""
        try:
            for chunk in stream:
                screen.clear()
                if not options.json:
                    print(chunk.text, end="", flush=True)
                    printed += chunk.text
        finally:
            screen.clear()
            if printed:  # an error begins a line, too
                print(flush=True)
        return stream.result


def reading_progress(screen: Screen) -> Callable[[int, int], None]:
    """Returns a function that shows how many tokens of a prompt have been read."""
    return lambda done, total: screen.show(f"reading the prompt: {done} of {total} tokens")


def request_with(options: argparse.Namespace, prompt: Prompt, sampling: SamplingParams) -> Generate:
    """Returns the checked request with this prompt and sampling; chat's --colors asks for the origins of its tokens."""
    chosen = {
        "mode": options.mode or "auto",
        "num_draft_tokens": options.num_draft_tokens,
        "branches": options.branches,
        "chat_template": not options.ignore_chat_template,
        "drafter": options.drafter or "",
        "origins": getattr(options, "colors", False),
    }
    return generate_message("generate", prompt, sampling, False, chosen)


@contextmanager
def open_client(options: argparse.Namespace, screen: Screen) -> Iterator[BaseClient]:
    """Yields a client of the servers at --connect, or of a cluster that lives as long as the context."""
    of_servers = (field for field in dataclasses.fields(ServeSettings) if field.name not in REQUEST_SETTINGS)
    named = ", ".join(flag_of(field) for field in of_servers if getattr(options, field.name, None) is not None)
    if options.connect is not None and named:
        raise InvalidRequest(f"{named} can't be used with --connect: the server was started with its own")
    settings = flags.settings_of(options)
    if options.connect is not None:
        clients = connect_all(options)
        yield clients[0] if len(clients) == 1 else Resumed(clients)
        return
    if options.model is None:
        require_mlx()  # before anything is downloaded
        settings["model"] = _use_default_model(options)
    try:
        cluster = LocalCluster(progress=screen.show, **settings)
    finally:
        screen.clear()
    with cluster:
        yield cluster.client()


def connect_all(options: argparse.Namespace) -> list[Client]:
    """Returns a client for each server at --connect.

    Raises:
        InvalidRequest: an entry is empty or repeated, or --server-key is given for several servers.
    """
    endpoints = [endpoint.strip() for endpoint in options.connect.split(",")]
    if len(endpoints) == 1:
        return [Client(endpoints[0], server_key=options.server_key, keys=options.keys)]
    if options.server_key is not None:
        raise InvalidRequest("--server-key is the key of one server; run `outrider keys trust` for each server")
    if "" in endpoints or len(set(endpoints)) < len(endpoints):
        raise InvalidRequest(f"--connect {options.connect} has an empty or repeated entry; expected each server once")
    return [Client(endpoint, FAILOVER_SECONDS, keys=options.keys) for endpoint in endpoints]


def prompt_of(options: argparse.Namespace) -> str | tuple[Message, ...]:
    """Returns the prompt, or the conversation that ends with it.

    Raises:
        InvalidRequest: there is neither, or the conversation ends with an answer and there is no prompt.
    """
    before = load_messages(options.system_prompt, options.chat)
    if options.prompt is None and options.chat is None:
        raise InvalidRequest("there is no prompt; expected PROMPT (- is stdin), or --chat with a conversation")
    if options.prompt is None:
        if before[-1]["role"] == "assistant":
            raise InvalidRequest(f"{options.chat} ends with an answer; give the next message with --prompt")
        return before
    prompt = read_prompt(options.prompt)
    if not before:
        return prompt
    if not prompt:
        raise InvalidRequest(EMPTY_PROMPT)
    return (*before, {"role": "user", "content": prompt})


def load_model_codec(options: argparse.Namespace) -> TextCodec:
    """Loads the tokenizer and chat template of the model that will answer, before anything is started.

    Raises:
        OutriderError: nothing answers at --connect, or the model's files are not on this machine.
    """
    name = options.model or (_use_default_model(options) if options.connect is None else _find_served_model(options))
    files = find_model(name, weights=False, keep_precision=bool(options.gguf_keep_precision))
    return load_codec(files, template=not options.ignore_chat_template)


def _use_default_model(options: argparse.Namespace) -> str:
    """Returns the default model, and sets it in the options."""
    options.model, note = default_model(bool(options.gguf_keep_precision))
    if note is not None:
        say(f"Note: {note}")
    return str(options.model)


def read_prompt(given: str) -> str:
    return sys.stdin.read() if given == "-" else given


def as_json(result: GenerationResult, request: Generate, prompt: str | tuple[Message, ...]) -> dict[str, Any]:
    """Returns the result, its timings under llama.cpp's names, and everything that `verify` needs."""
    sampling = dataclasses.asdict(request.sampling)
    del sampling["seed"]  # None for a seed that the server chose; `seed` below is the one in use
    return {
        **dataclasses.asdict(result),
        "timings": structs.asdict(result.timings),
        "prompt": prompt,
        "chat_template": request.chat_template,
        "sampling": sampling,
    }


def _find_served_model(options: argparse.Namespace) -> str:
    """Returns the model of the running server: its folder, which only this machine's servers share."""
    clients = connect_all(options)
    for client in clients:
        try:
            workers = client.stats().workers
        except EndpointError:
            if client is clients[-1]:
                raise
            continue
        name = next((worker.model for worker in workers if worker.role == "target" and worker.model), None)
        if name is not None and not os.path.exists(name):
            raise ModelError(
                f"the server's model is in {name} on its own machine, and this one needs its tokenizer for a"
                " conversation; copy that folder here, or use the server's page or HTTP API"
            )
        if name is not None:
            return name
    raise EndpointError(f"the server at {options.connect} has not loaded its model yet; try again when it is ready")
