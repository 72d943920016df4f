"""Writes docs/protocol.md from the dataclasses: `python -m outrider.protocol.document [PATH]`. A test holds it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import msgpack
import numpy as np

from outrider.protocol.clock import ASK_AGAIN_NS, FORGET_NS, MILLISECOND_NS
from outrider.protocol.codec import MESSAGES, encode
from outrider.protocol.messages import Close, Features, Message
from outrider.protocol.schema import MAX_CHARACTERS, MAX_FRAME, MAX_ITEMS, Many, Maybe, Record, Shape, fields_of, words
from outrider.protocol.version import PROTOCOL_VERSION

PAGE = Path("docs/protocol.md")
SECOND_NS = 1000 * MILLISECOND_NS


def _header(message: Message) -> str:
    return json.dumps(msgpack.unpackb(encode(message)[0]))


HEAD = f"""\
# The protocol

<!-- Written by `python -m outrider.protocol.document` from protocol/messages/. Change that, not this. -->

What the orchestrator, the workers and the clients say to each other. This is version {PROTOCOL_VERSION}.

## Framing

A message is a header and the arrays it names, a frame each. What leaves for one process together is a *bundle*: one
ZeroMQ multipart message of one message or several, one after the other. (A ROUTER socket puts the peer's identity in
front; that is not part of it.) The target's outcomes of one forward travel so, and the words they bring about; clients
say and hear one message at a time. A bundle with a message that is refused is refused as a whole.

- **The header** is msgpack: `[version, name, [value, ...]]`, the values of the message's fields in their order. Every
  field is sent, defaults too; a record inside a message is an array of its fields like the outer one; a tuple is an
  array; there is no map, no binary and no extension type.
- **One frame an array**, in field order. The array's field holds `[dtype, shape]` in the header; the frame holds its
  items, little-endian, last axis fastest. An array field that is nil has no frame.

As JSON would write it, `Close("r1")` is the single frame `{_header(Close("r1"))}`; a `Features` with a row of two
numbers is `{_header(Features("r1", 1, 7, np.zeros((1, 2), np.float16)))}` and a frame of 4 bytes.

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
itself comes first in the header, then the message's name, and `request` keeps its place among the fields of a message,
so that a peer of another release can be told.

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

**When a message is lost.** ZeroMQ keeps a link's order, says nothing twice and loses messages only with their
connection. Less is needed: messages of a request may be lost, late, doubled or out of order, and it ends with the same
text, as long as some get through.

- *No outcome comes.* After {ASK_AGAIN_NS // SECOND_NS} s in which the target was not heard to get on, the orchestrator
  says `Verify` of the round under way again, also where that round began with `Open`, and `Halt` if that was said. The
  target answers what it kept and is silent while it reads or verifies. Where it knows nothing of the request, or has
  gone on farther than it remembers, it says `Resync`, and a new epoch begins.
- *No word of a drafter comes.* Waits for drafters are bounded; then the target goes on alone. What a drafter missed it
  finds by `base_len` of the next `Commit`.
- *No `Close` comes.* What a worker has heard nothing of for {FORGET_NS // SECOND_NS} s, and has nothing to do for, it
  closes when another request is opened. If it was not over, the next word about it is answered by `Resync`.
- *A `PromptKv` is lost*, or whoever reads a prompt in the target's place: the target reads on by itself where it finds
  a gap, or at the first `Verify`.
- `Prepare`, `Halt`, `Prefilled`, `CacheReport` and `KvMemory` cost time or memory, never a text.
- What is altered on its way is refused by the codec or must be kept out below it, as TCP does: no message has a
  checksum. A drafter's words that come through altered cost time; under residual sampling `q` is trusted.

## Endpoints

`ipc://PATH` on one machine: the path of a unix socket, 107 bytes at most on Linux and 103 on macOS. A lock on
`PATH.lock` says who serves it, so that a second server is refused and a killed one is replaced. `tcp://HOST:PORT`
for clients on other machines, and one more for drafters; IPv6 addresses stand in brackets. A server's own workers
connect by ipc. Beyond this machine, and where it is asked for, ZeroMQ's CURVE encrypts, and lets in by key: its ZAP
domains are `client` and `drafter`, one an endpoint. `connect` and `bind` refuse another machine's address without keys
(docs/security.md). A drafter there says `Hello` like any other; its `vocabulary` has to be the cluster's. Who says
something in another protocol version is answered once, in the server's: by `Shutdown` with both versions in a sentence,
and by its header alone.
"""


def page() -> str:
    """The whole document."""
    parts = [HEAD]
    for title, group in (
        ("Between the orchestrator and its workers", {**_messages_of("workers"), **_messages_of("rounds")}),
        ("Between the ranks of one target", _messages_of("ranks")),
        ("Between a client and the orchestrator", _messages_of("clients")),
        ("Records inside messages", _records()),
    ):
        parts.append(f"## {title}\n")
        parts.extend(_section(name, cls) for name, cls in group.items())
    return "\n".join(parts)


def _messages_of(file: str) -> dict[str, type]:
    """Those of one file of protocol/messages/."""
    return {name: cls for name, cls in MESSAGES.items() if cls.__module__.endswith(f".{file}")}


def _records() -> dict[str, type]:
    """Every dataclass reachable from a message, in the order of first use."""
    found: dict[str, type] = {}
    waiting = list(MESSAGES.values())
    while waiting:
        for shape in fields_of(waiting.pop(0)).values():
            cls = _record_in(shape)
            if cls is not None and cls.__name__ not in found:
                found[cls.__name__] = cls
                waiting.append(cls)
    return found


def _record_in(shape: Shape) -> type | None:
    match shape:
        case Record(cls):
            return cls
        case Many(inner) | Maybe(inner):
            return _record_in(inner)
    return None


def _section(name: str, cls: type) -> str:
    lines = [f"### {name}\n", inspect.cleandoc(cls.__doc__ or ""), ""]
    if shapes := fields_of(cls):
        defaults = ["" if field.default is MISSING else f"`{field.default!r}`" for field in fields(cls)]
        rows = zip(shapes.items(), defaults, strict=True)
        lines += ["| field | may be | default |", "|---|---|---|"]
        lines += [f"| `{name}` | {_linked(words(shape))} | {default} |" for (name, shape), default in rows]
        lines += [""]
    return "\n".join(lines)


def _linked(said: str) -> str:
    """Records with a link to where they stand; all else begins with a small letter."""
    return re.sub(r"\ba ([A-Z]\w+)", lambda found: f"[{found[1]}](#{found[1].lower()})", said)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
