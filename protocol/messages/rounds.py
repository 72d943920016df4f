"""Between the orchestrator and its workers about one request: the rounds.

These carry `request`, `epoch`, `round` and `base_len`. `base_len` is the number of committed tokens when the round's
verify starts, so chain token i stands at absolute position base_len + i. Times are `time.monotonic_ns` of the sender's
machine; a Pong tells what that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import (
    MAX_BESIDE,
    MAX_BRANCHES,
    Breadth,
    Bytes,
    Chain,
    Committed,
    Count,
    Depth,
    Final,
    Halves,
    Logprobs,
    Name,
    Nanoseconds,
    Node,
    OneOf,
    Parents,
    Path,
    RequestId,
    Serial,
    Size,
    Token,
    Tokens,
)
from outrider.protocol.trees import SparseQ


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of evaluated work: when it started and ended."""

    started_ns: Nanoseconds
    ended_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Open:
    """Orchestrator -> every worker: a request begins (or begins again) from these tokens.

    The verify of an empty chain: the target answers Outcome(round 0, accepted 0, bonus). Drafters prepare branches for
    the outcomes of `verifying`, normally the empty chain of round 0; None: only read the tokens. `eos` are the tokens
    that end this request (empty when it ignores them): no outcome worth preparing. The last `generated` of the tokens
    are not the prompt's: a grammar begins with them. `rank_offset`, `min_prob` as in Commit. `offered`: a prefill
    worker may read the text for the target, which says at once by Prefilled what it has, and waits for PromptKv until a
    Verify comes. `features`: the target is to tell Features, for a drafter may read them.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    tokens: Tokens
    sampling: SamplingParams
    eos: Chain = ()
    depth: Depth = 0
    branches: Breadth = 0
    verifying: Chain | None = None
    generated: Count = 0
    rank_offset: Breadth = 0
    offered: bool = False
    features: bool = False
    min_prob: float = 1.0

    @property
    def prompt_len(self) -> int:
        """How many of the tokens are the prompt's."""
        return len(self.tokens) - self.generated


@dataclass(frozen=True, slots=True)
class Verify:
    """Orchestrator -> target: one forward over the last committed token plus `chain`.

    `kind` says how the chain was proposed and so which rule verifies it: by equality, or by rejection sampling against
    a certain proposal (one-hot) or against `q`, which a sparse one was drawn from. With `parents` its tokens are a
    tree, which is verified by equality, by a target that has said that it does so.

    `autonomous` lets the target go on by itself from then on, one Outcome a round, until Halt or any other word about
    the request: with `draft` = K tokens of a drafter in its own process in each round, this one included, whose `chain`
    is empty; with 0 by plain decoding. `drafter` is that one's name (`abilities.OwnDrafter`); empty: the first.
    `max_tokens` is then how many tokens the request may still grow by: the rounds end there, or with a token of Open's
    `eos`. `min_prob` as in Commit, for that drafter.

    With `draft` and without `autonomous` that drafter drafts for this round alone, and `chain`, or a tree, stands
    beside it: the target verifies all that the drafter says, then what that lacks of this (`trees.united`), 64 nodes at
    most. `max_tokens` is told then, too.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    chain: Chain
    kind: Annotated[str, OneOf(("coupled", "one-hot", "sparse"))] = "coupled"
    q: SparseQ | None = None
    autonomous: bool = False
    draft: Depth = 0
    max_tokens: Count = 0
    parents: Parents = ()
    drafter: Name = ""
    min_prob: float = 1.0


@dataclass(frozen=True, slots=True)
class Halt:
    """Orchestrator -> target: stop going on by yourself; the outcome of the round under way is the last unasked one."""

    request: RequestId
    epoch: Serial


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What a drafter thought next best beside the tokens of a chain: each behind the chain's token `parents[i]`, or -1.

    `odds`: that it holds, where that one does. Nothing follows it.
    """

    tokens: Annotated[tuple[Token, ...], Size(MAX_BESIDE)]
    parents: Annotated[tuple[Node, ...], Size(MAX_BESIDE)]
    odds: Annotated[tuple[float, ...], Size(MAX_BESIDE)]


@dataclass(frozen=True, slots=True)
class Branch:
    """The chain drafted for the outcome that makes the tokens `committed` final: accepted ones, then the bonus."""

    committed: Final
    chain: Chain
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Orchestrator -> target, while it verifies `round`: the branches that are complete.

    If the outcome makes `committed[i]` final (accepted tokens, then the bonus) the target verifies `chains[i]` as the
    next round, unasked, and says so in Outcome; it does not wait for an answer. Replaces what was prepared before.
    `parents[i]` are those of a chain that is a tree; (): none of them is one.
    Coupled sampling only. Without records, for it is read between two verifies, with cold caches.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    committed: Annotated[tuple[Final, ...], Size(MAX_BRANCHES)]
    chains: Annotated[tuple[Chain, ...], Size(MAX_BRANCHES)]
    parents: Annotated[tuple[Parents, ...], Size(MAX_BRANCHES)] = ()

    def chain(self, committed: Final) -> tuple[Chain, Parents] | None:
        """What was prepared for the outcome that makes these tokens final, and the parents of its tokens."""
        found = zip_longest(self.committed, self.chains, self.parents, fillvalue=())
        return next(((chain, parents) for known, chain, parents in found if known == committed), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Target -> orchestrator: `accepted` chain tokens hold, then `bonus`. Of a tree those at `path`, or the first ones.

    `idle_ns`: from the end of the request's verify before to the start of this one. `next_proposal`: the target goes on
    with the next round unasked, by this prepared chain (`next_parents`, if it is a tree), or with an empty one as
    Verify's `autonomous` let it; None: it waits for Verify. `rows`: the tokens of its forward, those of other requests
    included. `peak_bytes`: the most memory MLX has held since the last request that began while no other ran. `drafted`
    is the chain that the target's own drafter had proposed for this round (`drafted_parents`, if it is a tree), and
    `drafting` when it did; None: it was not asked to. What held is of that and what Verify had beside it. `work` is the
    verify alone. `logprobs`: those of the tokens that it makes final, if the request asked for them.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    accepted: Count
    bonus: Token
    work: Span
    idle_ns: Nanoseconds = 0
    next_proposal: Chain | None = None
    rows: Count = 1
    peak_bytes: Serial = 0
    drafted: Chain | None = None
    drafting: Span | None = None
    logprobs: Logprobs | None = None
    path: Path | None = None
    next_parents: Parents = ()
    drafted_parents: Parents = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Target -> orchestrator -> drafters that read it: `rows` of committed tokens, the first of them at `position`.

    What the head in the draft worker is fed, made of hidden rows in the target's forward, in half precision. They leave
    with what tells of that forward: a prompt's as it is read, a round's before its Outcome. Whether both ends mean the
    same by a row they say in Hello. Nobody waits for one that is lost: the head goes on by vectors of its own.
    """

    request: RequestId
    epoch: Serial
    position: Count
    rows: Halves


@dataclass(frozen=True, slots=True)
class Commit:
    """Orchestrator -> drafters, in the same breath as Verify.

    `tokens` became final; with them `base_len` tokens are committed. `verifying` is the chain under verification
    (possibly empty): prepare up to `branches` of its outcomes, `depth` tokens each, and leave the `rank_offset`
    likeliest to other drafters. None: draft the continuation of the committed text, `depth` tokens, and answer with
    Drafted. Beside a chain's tokens others are told that hold with a probability of more than `min_prob`; 1: none.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    tokens: Committed
    verifying: Chain | None
    depth: Depth
    branches: Breadth
    rank_offset: Breadth = 0
    min_prob: float = 1.0


@dataclass(frozen=True, slots=True)
class Branches:
    """Drafter -> orchestrator, unasked: the branches of this round's outcomes as deep as they are by now.

    `final` says that nothing more will come for the round. `q`: what the chains' tokens were drawn from, a row a token,
    entry after entry; None: they were not drawn by chance. `peak_bytes` as in Outcome, of the drafter; 0: not known.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    depth: Depth
    entries: Annotated[tuple[Branch, ...], Size(MAX_BRANCHES)]
    work: Span
    final: bool = False
    q: SparseQ | None = None
    peak_bytes: Serial = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafter -> orchestrator: the continuation asked for by Commit(verifying=None); to be verified in `round`.

    `q`: what each of its tokens was drawn from; None: they were not drawn by chance.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    chain: Chain
    work: Span
    q: SparseQ | None = None
    peak_bytes: Serial = 0
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Orchestrator -> prefill worker: read these tokens for the target, and hand over what it lacks, from `start` on.

    All but the last token: that one the target feeds itself. Close ends it earlier.
    """

    request: RequestId
    epoch: Serial
    tokens: Tokens
    start: Count


@dataclass(frozen=True, slots=True)
class PromptKv:
    """Prefill worker -> orchestrator -> target: keys and values of `count` tokens of the text, from `start` on.

    `data`: layer after layer, keys before values, [kv_heads, count, head_dim] in the model's own number format.
    """

    request: RequestId
    epoch: Serial
    start: Count
    count: Count
    data: Bytes


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Worker -> orchestrator: how much of a long prompt has been read.

    `cached`: so many of its first tokens are not read, for they were remembered; said of short ones, too.
    """

    request: RequestId
    epoch: Serial
    done: Count
    total: Count
    cached: Count = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Orchestrator -> every worker: the request is over; free its slot."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Resync:
    """Worker -> orchestrator: something was missed; answer with Open and the committed tokens."""

    request: RequestId
    epoch: Serial
