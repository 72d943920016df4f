"""Writes docs/protocol.md from the dataclasses: `python -m outrider.protocol.document [PATH]`. A test holds it."""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from outrider.protocol.codec import MESSAGES
from outrider.protocol.endpoints import MAX_FRAME
from outrider.protocol.schema import (
    MAX_CHARACTERS,
    MAX_ITEMS,
    Field,
    Fixed,
    Flag,
    Many,
    Maybe,
    Raw,
    Real,
    Record,
    Shape,
    String,
    Whole,
    Word,
    fields_of,
)
from outrider.protocol.version import PROTOCOL_VERSION

PAGE = Path("docs/protocol.md")

HEAD = f"""\
# The protocol

<!-- Written by `python -m outrider.protocol.document` from protocol/messages/. Change that, not this. -->

What the orchestrator, the workers and the clients say to each other. This is version {PROTOCOL_VERSION}.

## Framing

A message is a header and the arrays it names, a frame each. What leaves for one process together is a *bundle*: one
ZeroMQ multipart message of one message or several, one after the other. (A ROUTER socket puts the peer's identity in
front; that is not part of it.) The target's outcomes of one forward travel so, and the words they bring about; clients
say and hear one message at a time. A bundle with a message that is refused is refused as a whole.

- **The header** is msgpack: `[version, name, {{field: value, ...}}]`. Every field is sent, defaults too; a record
  inside a message is a map like the outer one; a tuple is an array; there is no binary and no extension type.
- **One frame an array**, in field order. The array's field holds `[dtype, shape]` in the header; the frame holds its
  items, little-endian, last axis fastest. An array field that is nil has no frame.

`Close("r1")` is the single frame `[{PROTOCOL_VERSION}, "Close", {{"request": "r1"}}]`; a `Chunk` with two tokens is
`[{PROTOCOL_VERSION}, "Chunk", {{"request": "r1", "text": "if", "token_ids": ["int32", [2]]}}]` and a frame of 8 bytes.

Whole numbers are never booleans, numbers are finite, and sizes have limits: {MAX_ITEMS:,} items and {MAX_CHARACTERS:,}
characters where the field states no smaller one, {MAX_FRAME // 2**20} MiB a frame. `encode` holds the sender to all of
this and `decode` the receiver. What is refused raises `ProtocolError`, one sentence with the field's place, its value
and what was expected; the receiver drops and counts the message and goes on. One thing differs: a well-formed message
whose `SamplingParams` are out of range raises `RefusedRequest`, which is an `InvalidRequest` too, in the words that the
Python API uses. The orchestrator answers a client's refused message with `Failed` when `request_of` can read the
request's id from it.

## Versions

Two processes talk only when their protocol versions are equal; a message of another version is refused with a sentence
that names both. The version is raised when a message changes that a release spoke. In every version, the version
itself comes first in the header, and `request` keeps its name, so that a peer of another release can be told.

## Whose turn it is: epoch, round, base_len

- `request` names a request for its whole life.
- `epoch` rises when the target asks to begin again (`Resync`). Nothing of an older epoch has meaning any more. Drafters
  come and go inside an epoch.
- `round` counts verifies inside an epoch; round 0 is the prefill, the verify of an empty chain.
- `base_len` is the number of committed tokens when the round's verify starts. Chain token *i* stands at absolute
  position `base_len + i`, and an outcome of `accepted` = *k* makes the next round's `base_len` larger by *k* + 1.

**Stale messages are dropped.** A receiver compares (`epoch`, `round`, `base_len`) with its own. What is older, or was
handled already, is dropped and counted: it is never an error, because a message may always be overtaken by a newer
decision. The target keeps its last two `Outcome`s and answers a repeated `Verify` from them. A drafter matches a
`Commit` by its tokens, keeps the longest common path and acts only on the newest. Who finds a gap it can't fill says
`Resync` and is answered by `Open` with the committed tokens.

## Endpoints

`ipc://PATH` on one machine: the path of a unix socket, 107 bytes at most on Linux and 103 on macOS. A lock on
`PATH.lock` says who serves it, so that a second server is refused and a killed one is replaced. `tcp://HOST:PORT`
for clients on other machines; IPv6 addresses stand in brackets. Workers connect by ipc. The protocol has no encryption
and no passwords of its own: serve TCP only on networks you trust.
"""


def page() -> str:
    """The whole document."""
    workers = {name: cls for name, cls in MESSAGES.items() if not _is_clients(cls)}
    clients = {name: cls for name, cls in MESSAGES.items() if _is_clients(cls)}
    parts = [HEAD]
    for title, group in (
        ("Between the orchestrator and its workers", workers),
        ("Between a client and the orchestrator", clients),
        ("Records inside messages", _records()),
    ):
        parts.append(f"## {title}\n")
        parts.extend(_section(name, cls) for name, cls in group.items())
    return "\n".join(parts)


def _is_clients(cls: type[Any]) -> bool:
    return cls.__module__ == "outrider.protocol.messages.clients"


def _records() -> dict[str, type[Any]]:
    """Every dataclass reachable from a message, in the order of first use."""
    found: dict[str, type[Any]] = {}
    waiting = list(MESSAGES.values())
    while waiting:
        for field in fields_of(waiting.pop(0)):
            cls = _record_in(field.shape)
            if cls is not None and cls.__name__ not in found:
                found[cls.__name__] = cls
                waiting.append(cls)
    return found


def _record_in(shape: Shape) -> type[Any] | None:
    match shape:
        case Record(cls):
            return cls
        case Many(inner, _) | Maybe(inner):
            return _record_in(inner)
    return None


def _section(name: str, cls: type[Any]) -> str:
    fields = fields_of(cls)
    lines = [f"### {name}\n", inspect.cleandoc(cls.__doc__ or ""), ""]
    if fields:
        lines += ["| field | may be | default |", "|---|---|---|", *map(_row, fields), ""]
    return "\n".join(lines)


def _row(field: Field) -> str:
    default = "" if field.default is MISSING else f"`{field.default!r}`"
    return f"| `{field.name}` | {_words(field.shape)} | {default} |"


def _words(shape: Shape) -> str:
    match shape:
        case Whole(low, high):
            return f"whole number, {_power(low)} to {_power(high)}"
        case Real():
            return "finite number"
        case Flag():
            return "true or false"
        case String(limit):
            return f"text, at most {limit:,} characters"
        case Word(words):
            return " or ".join(f"`{word}`" for word in words)
        case Raw(array):
            sign = "" if array.low is None else f", none under {array.low}"
            return f"{array.dtype} array, {array.axes} {'axis' if array.axes == 1 else 'axes'}{sign}"
        case Many(item, limit):
            return f"at most {limit:,} of: {_words(item)}"
        case Fixed(items):
            return f"({'; '.join(map(_words, items))})"
        case Maybe(inner):
            return f"nil, or {_words(inner)}"
        case Record(cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"


def _power(value: int) -> str:
    """2^31-1 rather than 2147483647."""
    for bits in (31, 63):
        if value == 2**bits - 1:
            return f"2^{bits}-1"
        if value == -(2**bits):
            return f"-2^{bits}"
    return f"{value:,}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
