"""The interface of a drafter: anything that proposes tokens. A new drafter is one file behind `Drafter` and
`TokenTree`, a line in `BACKENDS` and a name in the settings.

A drafter deals in tokens and nodes; it knows nothing of sockets, rounds or which outcomes are worth preparing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from outrider.engine.prompt_cache import PromptCache
from outrider.engine.tree_feed import Candidate, TreeFeed
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.heads import AHEAD
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Halves
from outrider.protocol.trees import SparseQ


class TokenTree(Protocol):
    """One request's committed tokens and the drafted tokens that grow from them.

    A *node* is a token that has been fed, so that what follows it is known. Nodes are ints, numbered from 0 in feeding
    order over the tree's life: the i-th node of a `feed` gets `next_node + i`. `root` is the last committed token's
    node. Scores are warped log-probabilities plus the request's Gumbel noise at that position (coupled sampling), or
    without noise (residual sampling).
    """

    @property
    def root(self) -> int: ...

    @property
    def next_node(self) -> int: ...

    @property
    def cached(self) -> int:
        """How many of the tokens it was opened with were remembered, and so not read."""
        ...

    @property
    def committed_len(self) -> int:
        """Number of committed tokens, the root's included."""
        ...

    @property
    def room(self) -> int:
        """How many further positions fit behind the committed tokens before the context ends."""
        ...

    def column_tokens(self) -> list[int]:
        """The token of every committed KV column, in order; must equal the committed tokens."""
        ...

    def child(self, node: int, token: int) -> int | None:
        """The fed node for `token` right after `node`, if there is one. May evaluate."""
        ...

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        """Feeds one token behind each parent, all in one forward, and returns their nodes.

        A token of None is the parent's own best continuation, kept on the device: feeding is lazy and never waits. A
        parent may be a node of this same call if its token comes earlier in the list and the child's token is not None.
        """
        ...

    def best(self, nodes: Sequence[int]) -> list[int]:
        """Each node's own best continuation. Waits for it."""
        ...

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        """The `count` best continuations of each node, best first. Waits for them."""
        ...

    def read(self, tokens: Sequence[int], more: bool = False) -> None:
        """Makes `tokens` final, which follow the root and were not drafted; the last becomes the root. Waits.

        Every pending node is dropped. Logits are computed for the last token only, so that many tokens cost no more
        memory than a prompt. With `more` there is no root until a later call reads the rest.
        """
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Makes `path` (a child of the root and so on downwards) final; its last node becomes the root.

        Descendants of the new root stay; every other pending node is dropped.
        """
        ...

    def close(self, spoilt: bool = False) -> None:
        """Frees what it holds. A prompt cache may keep it for later texts, unless it is `spoilt` by a failure."""
        ...


class Drafter(Protocol):
    """Proposes tokens: opens one tree a request.

    `prompt_cache`: what it remembers of texts that have ended; nothing if it reads every text in full. `note`: what a
    person should know about how it runs; mostly empty.
    """

    backend: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    prompt_cache: PromptCache
    note: str

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> TokenTree:
        """Prefills `tokens` (at least one) and returns the tree whose root is the last of them.

        What `constraint` rules out scores -inf; a drafter without scores may leave it out, for the target has it too.
        """
        ...


class DrawingTree(TokenTree, Protocol):
    """A tree for residual sampling: a node's own continuation, `best` or a fed None, is drawn from a known q.

    Each chain has noise of its own, and begins behind a token that the caller gave (`engine.residual`).
    """

    def child(self, node: int, token: int, told: bool | None = None) -> int | None:
        """As `TokenTree.child`; `told`: only a node that was fed as a token (True), or only one fed as None (False)."""
        ...

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        """What each node's own continuation was drawn from, a row a node; None for no nodes. Waits for it."""
        ...


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """A drafter that can draw. One that can't proposes its best tokens for residual sampling too."""

    def open_drawing(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        cached: int,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> DrawingTree:
        """As `open`. `cached`: the number of continuations of a node whose weight Saguaro's factor lowers."""
        ...


@runtime_checkable
class FeatureTree(TokenTree, Protocol):
    """A tree that reads the target's hidden rows."""

    def add_features(self, position: int, rows: Halves) -> None:
        """Rows [N, W] of tokens, the first at `position`, as they arrive: they may come before the tokens' commit."""
        ...

    def ready(self, ahead: int = 0) -> bool:
        """Whether it can grow, or could after reading `ahead` more tokens. Before that there is no root."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter whose trees read the target's rows. `features` names their source; both ends compare it."""

    features: str


@runtime_checkable
class BatchingDrafter(Drafter, Protocol):
    """A drafter whose trees can grow in one forward. The trees of others are fed one after the other."""

    def feed_together(self, trees: Sequence[TokenTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        """As `TokenTree.feed` for each tree; a call that fails leaves every tree as it was."""
        ...


class DrafterFault(OutriderError):
    """The drafter can't continue with this request; the target continues alone."""


Progress = Callable[[str], None]


def _mlx(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.coreml.prompts import reader_for
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(model, progress, reader_for(model, prefill, progress))


def _replay(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.replay import ReplayDrafter, Script

    return ReplayDrafter(Script.read(Path(model)))


def _coreml(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.coreml.drafter import load

    return load(model, progress)


BACKENDS: dict[str, Callable[[str, str, Progress], Drafter]] = {"coreml": _coreml, "mlx": _mlx, "replay": _replay}
NAMES = (*sorted(BACKENDS), *AHEAD)


def _head(kind: str, model: str, target: str, progress: Progress) -> Drafter:
    from outrider.drafters.heads.ahead import AheadHead

    return AheadHead.load(kind, model, target, progress)


def make(backend: str, model: str, progress: Progress, prefill: str = "auto", target: str = "") -> Drafter:
    """The drafter `backend` for `model` (a model directory; for `replay` its script; `coreml` takes a package too).

    Args:
        prefill: what reads prompts for `mlx`, see `drafters.coreml.prompts`.
        target: the folder of the model whose rows a head reads.
    """
    if backend in AHEAD:
        return _head(backend, model, target, progress)
    if backend not in BACKENDS:
        raise InvalidRequest(f"unknown drafter {backend!r}; expected one of {', '.join(NAMES)}")
    return BACKENDS[backend](model, prefill, progress)
