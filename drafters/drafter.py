"""The interface of drafters, which propose tokens. To add one, extend `Drafter` and implement `TokenTree` in a new
file, and add a case to `make_drafter` and its name to `protocol.heads.DRAFTER_BACKENDS`.

A drafter knows tokens and nodes; it knows nothing of sockets, rounds or the outcomes to prepare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from outrider.drafters.fan_out import Calibration
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.heads import DRAFTER_BACKENDS, WORKER_HEADS
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Halves
from outrider.protocol.trees import Candidate, SparseQ, TreeFeed

if TYPE_CHECKING:
    from outrider.engine.residual import Draws
    from outrider.engine.sampling import Sampler

BACKENDS = (*DRAFTER_BACKENDS, *WORKER_HEADS)


class TokenTree(Protocol):
    """One request's committed tokens and the drafted tokens that grow from them.

    A *node* is a token that has been fed, so that the scores after it are known. Nodes are ints, numbered from 0 in the
    order of feeding: the i-th node of a feed gets `next_node + i`. `root` is the last committed token's node. Scores
    are warped log-probabilities plus the request's Gumbel noise at that position (coupled sampling), or without noise
    (residual sampling).

    For residual sampling a tree may draw: a node's own continuation (`best`, or a fed None) is drawn from a known q.
    Each drawn chain has its own noise, and begins after a token that the caller gave (`engine.residual`).
    """

    draws: bool
    root: int
    next_node: int

    @property
    def committed_len(self) -> int:
        """The number of committed tokens, including the root's."""

    @property
    def room(self) -> int:
        """The number of positions left in the context after the committed tokens."""

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        """Returns the fed node for `token` right after `node`, or None; with `given` True only one
        that was fed as a token, with False only one that was fed as None. May evaluate."""

    @staticmethod
    def feed_together(trees: Sequence[Any], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        """Feeds trees of one drafter one token after each parent, and returns their nodes. A tree's tokens share a
        forward, and those of all trees if they can.

        A token of None is the parent's best continuation. On a GPU it stays on the device: feeding is lazy and never
        waits. A parent may be a node of this same call if its token comes earlier in the list and the child's token is
        not None. A call that fails leaves every tree as it was.
        """

    def best(self, nodes: Sequence[int]) -> list[int]:
        """Returns each node's best continuation. Waits for it."""

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        """Returns the `count` best continuations of each node, best first; fewer, but at least the best, if it has no
        others. Waits for them."""

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        """Returns the distributions that the nodes' continuations were drawn from, one row for each node; None without
        nodes, or if they are not drawn. Waits for them."""

    def read(self, tokens: Sequence[int]) -> int:
        """Commits a piece of `tokens`, which follow the committed ones and were not drafted. Waits.

        Drops every pending node. The last of `tokens` becomes the root; there is none until a later call reads the
        rest. Logits are computed for that token only, so that a text of any length takes little memory.

        Returns:
            The length of the piece, or of the part of a new text that is in the prompt cache. A tree that reads the
            target's features reads the tokens whose features have arrived.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Commits `path`, which leads down from a child of the root; its last node becomes the root.

        Drops every pending node that does not descend from the new root.
        """

    def add_features(self, position: int, rows: Halves) -> None:
        """Adds the target's features [N, W] of tokens from `position` on, before the tokens are read. A tree that
        reads no features ignores them."""

    def can_read(self, count: int) -> bool:
        """Returns whether a piece of the next `count` tokens can be read now."""

    def can_grow(self) -> bool:
        """Returns whether there is a root."""

    def close(self, discard: bool = False) -> None:
        """Frees its memory. A prompt cache may keep its rows. `discard`: it must not, after a failure."""


class Drafter:
    """Proposes tokens; opens one tree for each request, which `make_tree` makes.

    `prompt_cache` holds prefixes of texts that have ended; it is empty if the drafter reads every text in full. `note`
    tells users how it runs, and is usually empty; one that runs in another's place also has it in `left_out`.
    `features`: the source of the target's features, as the target must have it, if its trees read them. `agreement`:
    how often it predicted the target's next token in a trial at load; None: there was none. `is_weak`: its `note` says
    why few drafts will be accepted.
    """

    backend: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    prompt_cache: PromptCache
    note = ""
    left_out: tuple[str, ...] = ()
    features = ""
    agreement: float | None = None
    is_weak = False

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration of all its drafts."""
        return Calibration()

    def open(
        self, tokens: Sequence[int], sampling: SamplingParams, constraint: Constraint | None = None, cached: int = 1
    ) -> TokenTree:
        """Returns a tree for a text that begins with `tokens` (at least one). Makes no forward: the caller reads the
        tokens that the tree has not committed.

        Tokens that `constraint` excludes score -inf; a drafter without scores may ignore it, because the target does
        not. For residual sampling the tree draws if the drafter can; Saguaro's factor then lowers the weight of
        `cached` continuations of a node. A drafter that can't draw proposes its best tokens.

        Raises:
            DrafterFault: it can't handle these tokens.
        """
        from outrider.engine.residual import Draws  # deferred, as below: imports mlx-lm

        self.check_text(tokens, len(tokens))
        return self.make_tree(self.sampler(sampling, constraint), Draws.of(sampling, cached))

    def check_text(self, tokens: Sequence[int], length: int) -> None:
        """Checks that it has these `tokens` of a text, and that a text of this length leaves room for a draft. The
        target may have more tokens: padding that only random models produce.

        Raises:
            DrafterFault: it lacks one of them, or the text is too long.
        """
        foreign = max(tokens, default=0)
        if foreign >= self.vocab_size:
            raise DrafterFault(
                f"token {foreign} is not among the {self.vocab_size} tokens of the draft model; drafting is off from"
                " here on"
            )
        if length >= self.context_length:
            raise DrafterFault(
                f"the text has {length} tokens and the draft model's context is {self.context_length}; drafting is off"
                " for this request"
            )

    def sampler(self, sampling: SamplingParams, constraint: Constraint | None = None) -> Sampler:
        """Returns the sampler of a text's drafts."""
        from outrider.engine.sampling import Sampler

        return Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)

    def make_tree(self, sampler: Sampler, draws: Draws | None) -> TokenTree:
        """Returns an empty tree with these scores, which draws its continuations if there are `draws` and it can."""
        raise NotImplementedError


class DrafterFault(OutriderError):
    """The drafter can't continue with this request; the target continues alone."""


def make_drafter(
    backend: str, model: str, progress: Callable[[str], None], prefill: str = "mlx", target: str = ""
) -> Drafter:
    """Returns the drafter `backend` for `model`, a model folder.

    Args:
        prefill: what reads prompts for `mlx`, and the package of `coreml` (`drafters.coreml.selection.find_package`).
        target: the folder of the model whose features a head reads.
    """
    match backend:
        case "mlx":
            from outrider.drafters.coreml.selection import load_prompt_reader
            from outrider.drafters.mlx import MlxDrafter

            return MlxDrafter.load(model, progress, load_prompt_reader(model, prefill, progress))
        case "coreml":
            from outrider.drafters.coreml.selection import load_drafter

            return load_drafter(model, prefill, progress)
    if backend not in WORKER_HEADS:
        raise InvalidRequest(f"unknown drafter {backend!r}; expected one of {', '.join(BACKENDS)}")
    from outrider.drafters.heads.load import load_for_draft_worker

    return load_for_draft_worker(backend, model, target, progress)
