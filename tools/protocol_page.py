"""Writes docs/protocol.md from the dataclasses: `python -m tools.protocol_page [PATH]`. A test checks the page."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path

import msgspec
import numpy as np
from msgspec import inspect as types

from outrider.orchestrator.cli import run_as_program
from outrider.protocol.clock import IDLE_REQUEST_TIMEOUT_NS, OUTCOME_TIMEOUT_NS, SECOND_NS
from outrider.protocol.codec import MESSAGES, encode
from outrider.protocol.messages import Close, Features, Message, RankHello, TextChange, TextForward
from outrider.protocol.schema import MAX_AXIS_LENGTH, MAX_CHARACTERS, MAX_FRAME_BYTES, MAX_ITEMS, Array, Record
from outrider.protocol.version import PROTOCOL_VERSION

PAGE_PATH = Path("docs/protocol.md")
RANK_MESSAGES = (RankHello, TextChange, TextForward)


def _header_json(message: Message) -> str:
    return json.dumps(msgspec.msgpack.decode(encode(message)[0]))


HEAD = f"""\
# The protocol

<!-- Written by `python -m tools.protocol_page` from protocol/messages/. Change that, not this. -->

This page describes the messages of protocol version {PROTOCOL_VERSION} between the orchestrator, the workers and the
clients.

## Framing

A message is a header and the arrays it names, one frame each. Messages that leave for one process together form a
*bundle*: one ZeroMQ multipart message that holds one or more messages in a row. (A ROUTER socket prepends the peer's
identity, which is not part of it.) The target sends the outcomes of one forward in a bundle, and so does the
orchestrator with the messages that they cause. Clients send and receive one message at a time. A bundle with an invalid
message is refused as a whole.

- **The header** is msgpack: `[version, message]`. The message is a map of its name, under `type`, and its fields.
  Fields that have their defaults may be left out. A record inside a message is a map of its fields, with its name
  under `type` where a field may hold one of several. A tuple is an array, a dict a map. There is no binary and no
  extension type.
- **Arrays** take one frame each, in the order of the header. The array's field holds `[dtype, shape]` in the header;
  the frame holds its items, little-endian, last axis fastest. An array field that is nil has no frame.

Written as JSON, `Close("r1")` is the single frame `{_header_json(Close("r1"))}`. A `Features` with
a row of two numbers is a frame of 4 bytes after
`{_header_json(Features("r1", 1, 7, np.zeros((1, 2), np.float16)))}`.

Whole numbers are never booleans, numbers are finite, and sizes are limited: {MAX_ITEMS:,} items and {MAX_CHARACTERS:,}
characters where the field states no smaller limit, {MAX_FRAME_BYTES // 2**20} MiB a frame. `encode` enforces this
for the sender and `decode` for the receiver. A violation raises `ProtocolError`, one sentence with the field's place
and what was expected. The receiver drops and counts the message and continues.

A well-formed message whose `SamplingParams` are out of range raises `RefusedRequest` instead, which is also an
`InvalidRequest`, with the text that the Python API uses. The orchestrator answers a client's refused message with
`Failed` when `read_request_id` can read the request's id from it.

## Versions

Two processes communicate only when their protocol versions are equal. A message of another version is refused with an
error that names both. The version is raised when a message changes that a release used. In every version the header
starts with the version, and the message is a map with `type` and, if it is about one, `request`, so that a peer of
another release can be answered.

## Ordering: epoch, round, base_len

- `request` identifies a request for its whole life.
- `epoch` increases when the target asks to start again (`Resync`). Messages of an older epoch are dropped. Drafters
  join and leave within an epoch.
- `round` counts verifies within an epoch; round 0 is the prefill, the verify of an empty chain.
- `base_len` is the number of committed tokens when the round's verify starts. Chain token *i* stands at absolute
  position `base_len + i`, and an outcome of `accepted` = *k* increases the next round's `base_len` by *k* + 1.

**Stale messages are dropped.** A receiver compares (`epoch`, `round`, `base_len`) with its own. Messages that are
older, or were handled already, are dropped and counted. They are never an error, because a newer decision may overtake
any message. The target keeps its last two `Outcome`s and answers a repeated `Verify` from them. A drafter matches a
`Commit` by its tokens, keeps the longest common path and acts only on the newest. A worker that finds a gap it cannot
fill sends `Resync`, and the orchestrator answers with `Open` and the committed tokens.

**When a message is lost.** ZeroMQ keeps the order of a link, repeats nothing, and loses messages only together with
their connection. The protocol does not rely on that: messages of a request may be lost, late, duplicated or out of
order, and the request still ends with the same text as long as some messages arrive.

- *No outcome arrives.* After {OUTCOME_TIMEOUT_NS // SECOND_NS} s without a sign of progress from the target, the
  orchestrator sends `Verify` of the current round again, also where that round began with `Open`, and `Halt` if that
  was sent. The target answers with the outcome it kept, and sends nothing while it reads or verifies. If it does not
  know the request, or no longer has that outcome, it sends `Resync`, and a new epoch begins.
- *No message of a drafter arrives.* Waits for drafters are bounded; then the target continues alone. The drafter
  detects what it missed from `base_len` of the next `Commit`.
- *No `Welcome` arrives.* A worker that joins by itself repeats `Hello`, and each is answered.
- *No `Close` arrives.* When a request is opened, a worker closes each request that has no work left and of
  which it has received no message for {IDLE_REQUEST_TIMEOUT_NS // SECOND_NS} s. If the request was not over, the
  worker answers the next message about it with `Resync`.
- *A `PromptKv` or the prefill worker is lost.* The target reads the rest of the prompt itself when it finds a gap, or
  at the first `Verify`.
- Losing `Prepare`, `Halt`, `Prefilled`, `CacheReport` or `KvMemory` costs time or memory, never a text.
- Messages have no checksum. The codec refuses altered messages that it can detect; the rest is left to the transport,
  as with TCP. Altered messages of a drafter cost time; under residual sampling `q` is trusted.

## Endpoints

- `ipc://PATH` connects processes on one machine. PATH is a unix socket of at most 107 bytes on Linux and 103 on macOS.
  A lock on `PATH.lock` marks the owner, so a second server is refused and a killed one is replaced. A server's own
  workers connect by ipc.
- `tcp://HOST:PORT` connects clients on other machines, and a second endpoint connects drafters. IPv6 addresses stand in
  brackets.

Beyond this machine, and where it is requested, ZeroMQ's CURVE encrypts the connection and admits peers by key. The ZAP
domains are `client` and `drafter`, one for each endpoint. `connect` and `BoundSocket` refuse another machine's address
without keys (docs/security.md). A drafter on another machine sends `Hello` like any other; its `vocabulary` must equal
the cluster's. A peer with another protocol version gets one answer, in the server's version: a `Shutdown` whose reason
names both versions. Only its header is read.
"""


def render_page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for title, group in (
        ("Between the orchestrator and its workers", {**_messages_in("workers"), **_messages_in("rounds")}),
        ("Between the ranks of one target", {cls.__name__: cls for cls in RANK_MESSAGES}),
        ("Between a client and the orchestrator", _messages_in("clients")),
        ("Records inside messages", _records()),
    ):
        parts.append(f"## {title}\n")
        parts.extend(_render_section(name, cls) for name, cls in group.items())
    return "\n".join(parts)


def _messages_in(file: str) -> dict[str, type]:
    """Returns the messages of one file of protocol/messages/."""
    ours = {name: cls for name, cls in MESSAGES.items() if cls.__module__.endswith(f".{file}")}
    return {name: cls for name, cls in ours.items() if cls not in RANK_MESSAGES}


def _records() -> dict[str, type]:
    """Returns every record that a message contains, in the order of first use."""
    found: dict[str, type] = {}
    waiting: list[type] = list(MESSAGES.values())
    while waiting:
        for field in _fields(waiting.pop(0)):
            for cls in _records_in(field.type):
                if cls.__name__ not in found:
                    found[cls.__name__] = cls
                    waiting.append(cls)
    return found


def _records_in(shape: types.Type) -> list[type]:
    match shape:
        case types.StructType(cls=cls) | types.DataclassType(cls=cls):
            return [cls]
        case types.VarTupleType(item_type=inner):
            return _records_in(inner)
        case types.UnionType(types=variants):
            return [cls for variant in variants for cls in _records_in(variant)]
    return []


def _fields(cls: type) -> tuple[types.Field, ...]:
    info = types.type_info(cls)
    return info.fields if isinstance(info, types.StructType | types.DataclassType) else ()


def _render_section(name: str, cls: type) -> str:
    lines = [f"### {name}\n", inspect.cleandoc(cls.__doc__ or ""), ""]
    if found := _fields(cls):
        lines += ["| field | may be | default |", "|---|---|---|"]
        for field in found:
            default = {} if field.default_factory is dict else field.default
            shown = f"{type(default).__name__}()" if isinstance(default, Record) else repr(default)
            default = "" if field.required else f"`{shown}`"
            lines.append(f"| `{field.name}` | {_add_links(describe_type(field.type))} | {default} |")
        lines += [""]
    return "\n".join(lines)


def describe_type(shape: types.Type) -> str:
    """Describes a value of this type."""
    match shape:
        case types.IntType(ge=int(low), le=int(high)):
            return f"a whole number from {_format_limit(low)} to {_format_limit(high)}"
        case types.IntType():
            return "a whole number"
        case types.FloatType(ge=0.0, le=1.0):
            return "a number from 0 to 1"
        case types.FloatType():
            return "a finite number"
        case types.EnumType(cls=cls):
            numbers = [one.value for one in cls]
            return f"a whole number from {min(numbers)} to {max(numbers)}"
        case types.BoolType():
            return "true or false"
        case types.StrType(pattern=str(pattern)):
            return f"one of {', '.join(re.findall(r'[a-z][a-z_ -]*', pattern))}"
        case types.StrType(max_length=limit):
            return "text" if limit is None else f"text of at most {limit:,} characters"
        case types.Metadata(extra={"array": Array(dtype, axes, least)}):
            sign = "" if least is None else f", none under {least}"
            return f"an array of {dtype}, {axes} {'axis' if axes == 1 else 'axes'} of at most {MAX_AXIS_LENGTH:,}{sign}"
        case types.VarTupleType(item_type=item, max_length=limit):
            return f"at most {limit:,} of: {describe_type(item)}"
        case types.DictType(value_type=value, max_length=limit):
            return f"at most {limit:,} of: {describe_type(value)}, by name"
        case types.TupleType(item_types=items):
            return f"({'; '.join(map(describe_type, items))})"
        case types.UnionType(types=(inner, types.NoneType())):
            return f"nil, or {describe_type(inner)}"
        case types.UnionType(types=variants):
            return ", ".join(map(describe_type, variants[:-1])) + f" or {describe_type(variants[-1])}"
        case types.StructType(cls=cls) | types.DataclassType(cls=cls):
            return f"{'an' if cls.__name__[0] in 'AEIO' else 'a'} {cls.__name__}"
    raise TypeError(f"{shape} is no type of a field")


def _format_limit(value: int) -> str:
    """Formats 2147483647 as 2^31-1."""
    return next((f"2^{bits}-1" for bits in (31, 63) if value == 2**bits - 1), f"{value:,}")


def _add_links(words: str) -> str:
    """Adds links to the names of records, the only words with a capital letter after an article."""
    return re.sub(r"\ban? ([A-Z]\w+)", lambda match: f"[{match[1]}](#{match[1].lower()})", words)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="?", default=PAGE_PATH, help=f"file to write (default: {PAGE_PATH})")


def run(options: argparse.Namespace) -> int:
    options.path.write_text(render_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
