"""The types that message fields are made of: each says its range or size, and the codec holds senders to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from outrider.protocol.origins import Origin


@dataclass(frozen=True, slots=True)
class Range:
    """A whole number (never a bool) from `low` to `high`, both included."""

    low: int = -(2**63)
    high: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Size:
    """A string or a sequence of at most `limit` characters or items."""

    limit: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array of this dtype and number of axes, sent as a raw frame; `low`: no item lies under it."""

    dtype: str
    axes: int
    low: int | None = None


MAX_TOKENS = 2**24
MAX_FRAME = 2**26
"""Bytes: the most tokens that there may be. Who announces more is disconnected before memory is taken for it."""
# Usually a chain and its bonus token; more when a drafter was not told for a while.
MAX_COMMIT = 4096
MAX_CHAIN = 64
MAX_BESIDE = 16
MAX_BRANCHES = 1024

Token = Annotated[int, Range(0, 2**31 - 1)]
Count = Annotated[int, Range(0, 2**31 - 1)]
Serial = Annotated[int, Range(0, 2**63 - 1)]
Nanoseconds = Annotated[int, Range(0, 2**63 - 1)]
Depth = Annotated[int, Range(0, MAX_CHAIN)]
"""How many tokens of a chain: what a worker is asked for is bounded work."""
Breadth = Annotated[int, Range(0, MAX_BRANCHES)]
"""How many branches."""
RequestId = Annotated[str, Size(64)]
Name = Annotated[str, Size(4096)]
ClientName = Annotated[str, Size(64)]
Text = Annotated[str, Size(2**26)]
Chain = Annotated[tuple[Token, ...], Size(MAX_CHAIN)]
Node = Annotated[int, Range(-1, MAX_CHAIN - 1)]
"""A token of a tree or a chain; -1: the text before."""
Parents = Annotated[tuple[Node, ...], Size(MAX_CHAIN)]
"""A tree's, as in `protocol.trees`: of each token, which one it follows on, or -1; (): the tokens are a chain."""
Path = Annotated[tuple[Annotated[int, Range(0, MAX_CHAIN - 1)], ...], Size(MAX_CHAIN)]
"""Nodes of a tree, from the text down."""
Final = Annotated[tuple[Token, ...], Size(MAX_CHAIN + 1)]
"""What an outcome makes final: the accepted tokens of a chain, then the bonus."""
Committed = Annotated[tuple[Token, ...], Size(MAX_COMMIT)]
Told = Annotated[tuple[Token, ...], Size(2**16)]
"""Those of a chunk, in the header: to a process that has slept an array costs as much as all the rest of it."""
Tokens = Annotated[np.ndarray[Any, np.dtype[np.int32]], Array("int32", 1, low=0)]
Bytes = Annotated[np.ndarray[Any, np.dtype[np.uint8]], Array("uint8", 1)]
Ids = Annotated[np.ndarray[Any, np.dtype[np.int32]], Array("int32", 2, low=0)]
Floats = Annotated[np.ndarray[Any, np.dtype[np.float32]], Array("float32", 2)]
Halves = Annotated[np.ndarray[Any, np.dtype[np.float16]], Array("float16", 2)]
Probabilities = Annotated[np.ndarray[Any, np.dtype[np.float32]], Array("float32", 2, low=0)]
Origins = Annotated[tuple[Annotated[int, Range(int(min(Origin)), int(max(Origin)))], ...], Size(2**16)]
"""An `Origin` a token."""
Mode = Annotated[str, OneOf(("auto", "ar", "sd", "ssd"))]
Role = Annotated[str, OneOf(("target", "draft", "prefill"))]
