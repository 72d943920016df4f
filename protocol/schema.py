"""The types of message fields, with their ranges and sizes, as msgspec checks them.

The codec, the documentation and the tests are derived from them; the codec enforces ranges and sizes for senders, too.
Knows nothing of bytes or messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, TypeVar

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import astuple

T = TypeVar("T")
MAX_FRAME_BYTES = 2**26
"""Bytes of a frame. A peer that announces more is disconnected before memory is allocated."""

# Usually a chain and its bonus token; more if a drafter was left out for a while.
MAX_COMMIT_TOKENS = 4096
MAX_CHAIN = 64
MAX_ALTERNATIVES = 16
MAX_BRANCHES = 1024
MAX_ITEMS = 2**16
MAX_CHARACTERS = 2**26
MAX_AXIS_LENGTH = 2**24
MAX_SERIAL = 2**63 - 1

Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite float; an int is accepted as the float of the same value."""

Many = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Serial = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
Depth = Annotated[int, Meta(ge=0, le=MAX_CHAIN)]
"""The number of tokens of a chain, bounded to bound a worker's work."""

RequestId = Annotated[str, Meta(max_length=64)]
MAX_NAME_CHARACTERS = 4096
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
IMPOSSIBLE_LOGPROB = float(np.finfo(np.float32).min)
"""The log-probability of an impossible token."""


class Record(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record inside messages."""


class Message(Record, frozen=True, tag=True):
    """The base of all messages, which are sent with their class's name."""


class Origin(IntEnum):
    """Where a committed token came from, for each token of a chunk. All but TARGET were drafted and accepted:
    `draft_n_accepted` counts them."""

    TARGET = 0
    """The target: plain decoding, or the bonus token after the accepted part of a chain."""
    PREPARED = 1
    """A branch that was drafted for this outcome before it was known."""
    DRAFTED = 2
    """A draft worker, on request, once the tokens before it were known."""
    COPIED = 3
    """The text itself: what followed the same n-gram before."""
    HEAD = 4
    """A head that reads the target's hidden states, in the target's process, on request."""
    GUESSED = 5
    """An alternative to a chain's token, which its drafter ranked next best."""

    @property
    def label(self) -> str:
        """The name in HTTP, in the records of rounds and in the trace."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array of this dtype and number of axes, sent as a raw frame; `low`: the smallest allowed item."""

    dtype: str
    axes: int
    low: int | None = None


def _array_type(array: Array) -> Any:
    """Returns the type of a field with such an array, for the codec and for `msgspec.inspect`."""
    return Annotated[np.ndarray[Any, array], Meta(extra={"array": array})]  # type: ignore[valid-type]


def one_of(*words: str) -> Meta:
    """Returns a constraint: the text must be one of these words."""
    return Meta(pattern=rf"^({'|'.join(words)})\Z")


Role = Annotated[str, one_of("target", "draft", "prefill")]

if TYPE_CHECKING:
    Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
    Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
    Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
    Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
    Halves: TypeAlias = np.ndarray[Any, np.dtype[np.float16]]
    Probabilities: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
else:
    Tokens = _array_type(Array("int32", 1, low=0))
    Ids = _array_type(Array("int32", 2, low=0))
    Bytes = _array_type(Array("uint8", 1))
    Floats = _array_type(Array("float32", 2))
    Halves = _array_type(Array("float16", 2))
    Probabilities = _array_type(Array("float32", 2, low=0))


class TokenRows(Record, frozen=True, eq=False):
    """Arrays with one row per token."""

    ids: Ids

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> Self:
        """Returns the rows [start, end)."""
        return type(self)(*(rows[start:end] for rows in astuple(self)))


class Logprobs(TokenRows, frozen=True, eq=False):
    """One row per token, [N, 1 + n]: the token itself, then the n likeliest at its position, the likeliest first.

    `values` are natural logarithms of the target's own probabilities after penalties, bias and grammar, before
    temperature and filters; -3.4e38 marks an impossible token.
    """

    values: Floats


def concat_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenates rows that have the same number of columns."""
    if not parts:
        return Logprobs(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))
    return Logprobs(np.concatenate([p.ids for p in parts]), np.concatenate([p.values for p in parts]))


def clip(text: str) -> str:
    """Returns a text that fits into a `Name`: its beginning, if it is longer."""
    return text if len(text) <= MAX_NAME_CHARACTERS else text[: MAX_NAME_CHARACTERS - 1] + "…"
