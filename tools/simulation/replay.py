"""Drafters of simulated machines: a known text with a given acceptance, and forwards as slow as a latency profile.

`ReplayDrafter` proposes the text of a `Script`, for tests and for simulated machines, and errs on purpose: a proposal
at chain position i is right with probability `acceptance[i]`, and after a wrong one the true token has a rank drawn
from `bonus_ranks`. Every draw is a function of (seed, position), so a run can be repeated exactly. There is no model.

`PacedDrafter` wraps a drafter: each forward of its trees takes the profile's time for its rows. `SlowLink` is the link
of a distant drafter: every message takes the profile's time each way. It has no thread of its own: messages that are
due are sent whenever the worker sends, receives or sleeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from outrider.drafters.drafter import Drafter, TokenTree
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Message
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Halves
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import Candidate, SparseQ, TreeFeed
from outrider.protocol.worker_link import WorkerLink
from tools.simulation.pace import BUSY_WAIT_SECONDS, Pace
from tools.simulation.profile import Profile

_MASK_64_BITS = 2**64 - 1
_READ_CHUNK_TOKENS = 256
# The purpose of a draw; the serial number of a wrong candidate is added to the last one.
_ACCEPT, _RANK, _WRONG = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Script:
    """The texts that `replay` proposes, as whole token sequences with their prompts, and how often it is right.

    The last entry of `acceptance` is used for all positions that follow; a rank beyond `bonus_ranks` never occurs.
    """

    texts: Collection[tuple[int, ...]]
    acceptance: tuple[float, ...]
    bonus_ranks: tuple[float, ...]
    vocab_size: int
    context_length: int = 1 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (*self.acceptance, *self.bonus_ranks)
        if not self.acceptance or not all(0.0 <= share <= 1.0 for share in shares):
            raise InvalidRequest(
                "replay script: acceptance and bonus_ranks need probabilities from 0 to 1, at least one"
            )
        if self.vocab_size < 64:
            raise InvalidRequest(f"replay script: vocab_size is {self.vocab_size}; expected at least 64")

    @classmethod
    def read(cls, path: Path) -> Script:
        """Reads a JSON file with this class's fields."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidRequest(
                f"replay script {path} can't be used ({error});"
                " expected JSON with texts, acceptance, bonus_ranks, vocab_size"
            ) from error


@dataclass(frozen=True, slots=True)
class _Node:
    """A fed token. `right`: the text up to here is the script's. `drafted`: the number of drafted tokens in a row."""

    parent: int
    token: int
    position: int
    right: bool
    drafted: int


class ReplayDrafter(Drafter):
    """A `Drafter` over a `Script`."""

    backend = "replay"
    parameters = 0
    weight_bytes = 0
    prompt_cache = PromptCache(KvCost())

    def __init__(self, script: Script) -> None:
        self._script = script
        self.vocab_size = script.vocab_size
        self.context_length = script.context_length

    def with_errors_of(self, profile: Profile) -> ReplayDrafter:
        """Returns a drafter of the same texts with the acceptance and the bonus ranks of `profile`."""
        script = replace(self._script, acceptance=profile.acceptance, bonus_ranks=profile.bonus_ranks)
        return ReplayDrafter(script)

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        constraint: Constraint | None = None,
        cached: int = 1,
    ) -> TokenTree:
        self.check_text(tokens, len(tokens))
        start = tuple(tokens)
        text = next((text for text in self._script.texts if text[: len(start)] == start), start)
        return ReplayTree(self._script, text, start)


class ReplayTree:
    """A `TokenTree` without a model: the next tokens are looked up, and replaced by wrong ones at the given rates."""

    def __init__(self, script: Script, text: tuple[int, ...], start: tuple[int, ...]) -> None:
        self._script = script
        self._text = text
        self._committed = list(start)
        self._nodes: dict[int, _Node] = {0: _Node(-1, start[-1], len(start) - 1, True, 0)}
        self._children: dict[tuple[int, int], int] = {}
        self.root = 0
        self.next_node = 1

    draws = False

    @property
    def committed_len(self) -> int:
        return len(self._committed)

    @property
    def room(self) -> int:
        return self._script.context_length - len(self._committed)

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        return self._children.get((node, token))

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        fed: list[int] = []
        for parent, given in zip(parents, tokens, strict=True):
            node = self._nodes[parent]
            token = self._proposal(node) if given is None else given
            position = node.position + 1
            right = node.right and position < len(self._text) and self._text[position] == token
            self._nodes[self.next_node] = _Node(
                parent, token, position, right, 0 if given is not None else node.drafted + 1
            )
            self._children[parent, token] = self.next_node
            fed.append(self.next_node)
            self.next_node += 1
        return fed

    @staticmethod
    def feed_together(trees: Sequence[ReplayTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        return [tree.feed(feed.parents, feed.tokens) for tree, feed in zip(trees, feeds, strict=True)]

    def best(self, nodes: Sequence[int]) -> list[int]:
        return [self._proposal(self._nodes[node]) for node in nodes]

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        return [self._ranked_candidates(self._nodes[node], count) for node in nodes]

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        return None

    def read(self, tokens: Sequence[int]) -> int:
        piece = tokens[:_READ_CHUNK_TOKENS]
        for token in piece:
            self.commit(self.feed([self.root], [token]))
        return len(piece)

    def add_features(self, position: int, rows: Halves) -> None:
        """Does nothing."""

    def can_read(self, count: int) -> bool:
        return True

    def can_grow(self) -> bool:
        return True

    def commit(self, path: Sequence[int]) -> None:
        for node in path:
            self._committed.append(self._nodes[node].token)
        if path:
            self.root = path[-1]
        kept = {self.root}
        for number in sorted(self._nodes):
            if self._nodes[number].parent in kept:
                kept.add(number)
        self._nodes = {number: self._nodes[number] for number in sorted(kept)}
        self._children = {key: number for key, number in self._children.items() if number in kept and key[0] in kept}

    def close(self, discard: bool = False) -> None:
        self._nodes.clear()

    def _proposal(self, node: _Node) -> int:
        truth = self._truth(node)
        shares = self._script.acceptance
        right = truth is not None and self._draw(node, _ACCEPT) < shares[min(node.drafted, len(shares) - 1)]
        return truth if right and truth is not None else self._wrong(node, truth, 0)

    def _ranked_candidates(self, node: _Node, count: int) -> list[Candidate]:
        truth, best = self._truth(node), self._proposal(node)
        tokens = {best: None}
        true_rank = self._true_rank(node) if truth is not None and best != truth else None
        serial = 1
        while len(tokens) < count:
            if true_rank is not None and len(tokens) == true_rank + 1 and truth is not None:
                tokens[truth] = None
                continue
            tokens[self._wrong(node, truth, serial)] = None
            serial += 1
        return [Candidate(token, float(rank)) for rank, token in enumerate(tokens)]

    def _true_rank(self, node: _Node) -> int | None:
        draw = self._draw(node, _RANK)
        for rank, share in enumerate(self._script.bonus_ranks):
            draw -= share
            if draw < 0:
                return rank
        return None

    def _truth(self, node: _Node) -> int | None:
        after = node.position + 1
        return self._text[after] if node.right and after < len(self._text) else None

    def _wrong(self, node: _Node, truth: int | None, serial: int) -> int:
        token = int(self._draw(node, _WRONG + serial) * self._script.vocab_size)
        return token if token != truth else (token + 1) % self._script.vocab_size

    def _draw(self, node: _Node, purpose: int) -> float:
        """Returns a hash in [0, 1): a round takes hundreds of draws, which must not delay a paced forward."""
        mixed = self._script.seed * 0x9E3779B97F4A7C15 + node.position * 0xBF58476D1CE4E5B9
        mixed = (mixed + node.token * 0x94D049BB133111EB + purpose * 0xD6E8FEB86659FD93) & _MASK_64_BITS
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> 31)) * multiplier & _MASK_64_BITS
        return ((mixed ^ (mixed >> 29)) >> 11) / 2**53


class PacedDrafter(Drafter):
    """Wraps `drafter`; its trees share one `pace`. `ready` returns when the newest message arrived."""

    def __init__(self, drafter: Drafter, name: str, pace: Pace, ready: Callable[[], float]) -> None:
        self._drafter, self._pace, self._ready = drafter, pace, ready
        self.backend, self.note = f"{drafter.backend}, simulating {name}", drafter.note
        self.vocab_size, self.context_length = drafter.vocab_size, drafter.context_length
        self.parameters, self.weight_bytes = drafter.parameters, drafter.weight_bytes
        self.prompt_cache = drafter.prompt_cache

    def open(self, *text: Any, **settings: Any) -> TokenTree:
        return cast(TokenTree, PacedTree(self._drafter.open(*text, **settings), self._pace, self._ready))


class PacedTree:
    """A `TokenTree` that answers when the profile's machine would."""

    def __init__(self, tree: TokenTree, pace: Pace, ready: Callable[[], float]) -> None:
        self.inner, self._pace, self._ready = tree, pace, ready

    def __getattr__(self, name: str) -> Any:
        """Returns attributes of the wrapped tree: all that take no time."""
        return getattr(self.inner, name)

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        (nodes,) = self.feed_together([self], [TreeFeed(parents, tokens)])
        return nodes

    @staticmethod
    def feed_together(trees: Sequence[PacedTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        """Feeds the trees in the time of one forward on the profile's machine."""
        first, inner = trees[0], [tree.inner for tree in trees]
        ready = first._ready()
        nodes = type(first.inner).feed_together(inner, feeds)
        first._pace.end(sum(len(fed) for fed in nodes), ready)
        return nodes

    def best(self, nodes: Sequence[int]) -> list[int]:
        best = self.inner.best(nodes)
        self._pace.wait()
        return best

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        candidates = self.inner.candidates(nodes, count)
        self._pace.wait()
        return candidates

    def read(self, tokens: Sequence[int]) -> int:
        ready = self._ready()
        count = self.inner.read(tokens)
        self._pace.end(count, ready)
        self._pace.wait()
        return count


SLICE_SECONDS = 0.0003  # how long a message may wait while this thread sleeps


class SlowLink:
    """Delays messages of `link` by `link_ms` each way.

    `received_at`: when the message last returned by `receive` arrived, in seconds of `time.perf_counter`.
    """

    def __init__(self, link: WorkerLink, link_ms: float) -> None:
        self.received_at = 0.0
        self._link = link
        self._delay = link_ms / 1000
        self._incoming: deque[tuple[float, Message]] = deque()
        self._outgoing: deque[tuple[float, Message]] = deque()

    @property
    def name(self) -> str:
        return self._link.name

    def send(self, message: Message) -> None:
        self._outgoing.append((time.perf_counter() + self._delay, message))
        self._deliver()

    def receive(self, wait: bool) -> Message | None:
        while True:
            self._deliver()
            if self._incoming and self._incoming[0][0] <= time.perf_counter():
                self.received_at, message = self._incoming.popleft()
                return message
            if not wait:
                return None
            if self._incoming or self._outgoing:
                time.sleep(SLICE_SECONDS)
            else:
                self._queue_incoming(self._link.receive(wait=True))

    def expect(self, milliseconds: float) -> None:
        self._link.expect(milliseconds)

    def sleep(self, seconds: float) -> None:
        """Sleeps, and delivers messages meanwhile."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._deliver()
            if left > BUSY_WAIT_SECONDS:
                time.sleep(min(left - BUSY_WAIT_SECONDS, SLICE_SECONDS))

    def _deliver(self) -> None:
        now = time.perf_counter()
        while self._outgoing and self._outgoing[0][0] <= now:
            self._link.send(self._outgoing.popleft()[1])
        while (message := self._link.receive(wait=False)) is not None:
            self._queue_incoming(message)

    def _queue_incoming(self, message: Message | None) -> None:
        if message is not None:
            self._incoming.append((time.perf_counter() + self._delay, message))
