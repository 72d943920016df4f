"""Messages between the orchestrator and its workers about one request: the rounds.

Most are a `RoundMessage`, with `request`, `epoch`, `round` and `base_len`. `base_len` is the number of committed tokens
when the round's verify starts, so chain token i stands at absolute position base_len + i. Times are `time.monotonic_ns`
of the sender's machine; a Pong reports the current value.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated

from msgspec import Meta

from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import (
    MAX_ALTERNATIVES,
    MAX_BRANCHES,
    MAX_CHAIN,
    MAX_COMMIT_TOKENS,
    Bytes,
    Count,
    Depth,
    Halves,
    Logprobs,
    Message,
    Name,
    Nanoseconds,
    Real,
    Record,
    RequestId,
    Serial,
    Token,
    Tokens,
)
from outrider.protocol.trees import Chain, DraftTree, Node, Parents, SparseQ

Breadth = Annotated[int, Meta(ge=0, le=MAX_BRANCHES)]
"""The number of branches."""

ChainOdds = Annotated[tuple[Annotated[float, Meta(ge=0.0, le=1.0)], ...], Meta(max_length=MAX_CHAIN)]
"""The probability that each token of a chain is accepted if those before it are; (): not known."""

Path = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_CHAIN - 1)], ...], Meta(max_length=MAX_CHAIN)]
"""Nodes of a tree, from the text down."""

CommitTokens = Annotated[tuple[Token, ...], Meta(max_length=MAX_CHAIN + 1)]
"""A commit: the accepted tokens of a chain, then the bonus token."""

Committed = Annotated[tuple[Token, ...], Meta(max_length=MAX_COMMIT_TOKENS)]
RowCosts = Annotated[tuple[Real, ...], Meta(max_length=MAX_CHAIN + 1)]
"""What the verify of 0, 1, ... draft tokens costs, in tokens."""


class Span(Record, frozen=True):
    """The start and the end of a piece of work."""

    started_ns: Nanoseconds
    ended_ns: Nanoseconds

    @property
    def duration_ns(self) -> int:
        return self.ended_ns - self.started_ns

    @property
    def milliseconds(self) -> float:
        return self.duration_ns / MILLISECOND_NS


class RequestMessage(Message, frozen=True):
    """A message about a request."""

    request: RequestId


class EpochMessage(RequestMessage, frozen=True):
    """A message of one epoch of a request; those of older epochs are void."""

    epoch: Serial


class RoundMessage(EpochMessage, frozen=True):
    """A message about a round of a request."""

    round: Serial
    base_len: Count


class Open(EpochMessage, frozen=True):
    """Orchestrator -> every worker: a request starts, or restarts, with these tokens.

    For the target Open is the verify of an empty chain, which it answers with Outcome(round 0, accepted 0, bonus).
    Drafters read the tokens; Commit tells them what to draft. `eos` are the tokens that end this request (empty if it
    ignores them); drafters prepare nothing after them. The last `generated` tokens are not the prompt's, and a grammar
    starts with them. `fan_out`: how many of a position's likeliest tokens Saguaro's factor lowers.

    `offered`: a prefill worker may read the text for the target. The target reports at once in Prefilled how many
    tokens it has cached, and waits for PromptKv until a Verify arrives. `features`: the target sends Features, because
    a drafter may read them.
    """

    round: Serial
    tokens: Tokens
    sampling: SamplingParams
    eos: Chain = ()
    generated: Count = 0
    fan_out: Breadth = 1
    offered: bool = False
    features: bool = False

    @property
    def prompt_len(self) -> int:
        """The number of the prompt's tokens."""
        return len(self.tokens) - self.generated


class DraftTokens(DraftTree, frozen=True, tag=True):
    """Draft tokens: a chain, or a tree if they have parents. They are verified by the request's sampling rule.

    `q`, for residual sampling only, is what a chain's tokens were drawn from; None: they were chosen with certainty.
    """

    q: SparseQ | None = None


class InProcess(Record, frozen=True):
    """A draft of `depth` tokens by the in-process drafter of this name (`Abilities.drafters`; "": the first).

    It also drafts alternatives with a probability above `min_prob`; 1: none. N-grams are verified as far as they are
    worth `row_costs`.
    """

    depth: Annotated[int, Meta(ge=1, le=MAX_CHAIN)]
    drafter: Name = ""
    min_prob: Real = 1.0
    row_costs: RowCosts = ()


class DraftInProcess(DraftTree, frozen=True, tag=True, kw_only=True):
    """The target drafts for this round, and verifies its draft together with these tokens, a chain or a tree.

    It verifies its drafter's tokens and then those of the others that are new (`trees.merge_trees`), 64 nodes at most.
    `max_tokens`: the number of tokens that the request may still grow by.
    """

    draft: InProcess
    max_tokens: Count


class Autonomous(Record, frozen=True, tag=True):
    """The target continues by itself from this round on, one Outcome a round, plainly or with a `draft` in each round.

    The rounds end after `max_tokens` tokens, at a token of Open's `eos`, or with Halt or any other message about the
    request.
    """

    max_tokens: Count
    draft: InProcess | None = None


class Verify(RoundMessage, frozen=True):
    """Orchestrator -> target: run one forward over the last committed token and the tokens of `proposal`.

    `all_cores`: no drafter works for the request until the next Verify, so the target may use the drafters' core.
    """

    proposal: DraftTokens | DraftInProcess | Autonomous = DraftTokens()
    all_cores: bool = False

    @property
    def chain(self) -> tuple[int, ...]:
        """The draft tokens of the proposal."""
        return () if isinstance(self.proposal, Autonomous) else self.proposal.chain

    @property
    def parents(self) -> tuple[int, ...]:
        """Their parents, if they are a tree."""
        return self.proposal.parents if isinstance(self.proposal, DraftTokens | DraftInProcess) else ()

    @property
    def autonomous(self) -> bool:
        """Whether the target continues by itself."""
        return isinstance(self.proposal, Autonomous)

    @property
    def draft(self) -> InProcess | None:
        """What the in-process drafter drafts; None: nothing."""
        return self.proposal.draft if isinstance(self.proposal, DraftInProcess | Autonomous) else None


class Halt(EpochMessage, frozen=True):
    """Orchestrator -> target: end autonomous rounds after the one under way."""


class Alternatives(Record, frozen=True):
    """Tokens that a drafter ranks next best to those of a chain: each follows the chain's token `parents[i]`, or -1.

    `odds` is the probability that the token is accepted if its parent is. Nothing follows an alternative.
    """

    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_ALTERNATIVES)]
    parents: Annotated[tuple[Node, ...], Meta(max_length=MAX_ALTERNATIVES)]
    odds: Annotated[tuple[Real, ...], Meta(max_length=MAX_ALTERNATIVES)]


class Branch(Record, frozen=True):
    """The chain drafted for the outcome that commits the tokens `committed`: the accepted ones, then the bonus.

    `odds` is the probability that each of its tokens is accepted if those before it are; (): not known.
    """

    committed: CommitTokens
    chain: Chain
    alternatives: Alternatives | None = None
    odds: ChainOdds = ()


class Prepare(RoundMessage, frozen=True):
    """Orchestrator -> target, during the verify of `round`: the complete branches.

    If the outcome commits `committed[i]` (accepted tokens, then the bonus), the target verifies `chains[i]` as the next
    round without waiting, and reports it in Outcome. Prepare has no answer and replaces what was prepared before.
    `parents[i]` are the parents of a chain that is a tree; (): none of the chains is one. Coupled sampling only. The
    fields are plain tuples instead of records, because the message is read between two verifies, with cold caches.

    With `row_costs` the target continues after any other outcome, too, with the n-grams that are worth their rows, if
    any: except after a token of Open's `eos`, or after `max_tokens` more tokens.
    """

    committed: Annotated[tuple[CommitTokens, ...], Meta(max_length=MAX_BRANCHES)]
    chains: Annotated[tuple[Chain, ...], Meta(max_length=MAX_BRANCHES)]
    parents: Annotated[tuple[Parents, ...], Meta(max_length=MAX_BRANCHES)] = ()
    row_costs: RowCosts = ()
    max_tokens: Count = 0

    def proposal(self, committed: CommitTokens) -> DraftTokens | None:
        """Returns what is prepared for the outcome that commits these tokens; None if nothing is."""
        prepared = zip_longest(self.committed, self.chains, self.parents, fillvalue=())
        return next((DraftTokens(chain, parents) for known, chain, parents in prepared if known == committed), None)


class InProcessDraft(DraftTree, frozen=True, kw_only=True):
    """What the in-process drafter proposed for a round, a chain or a tree, and when it worked."""

    span: Span


class Outcome(RoundMessage, frozen=True):
    """Target -> orchestrator: `accepted` draft tokens are accepted, then comes `bonus`. In a tree, the accepted nodes
    are those at `path`, or the first ones.

    - `next_proposal`: the target continues with the next round by these tokens, which were prepared or are n-grams, or
      with none if it is autonomous; None: it waits for Verify.
    - `work` is the span of the verify alone; `idle_ns` runs from the end of the request's previous verify to its start.
    - `rows` counts the tokens of the forward, those of other requests included.
    - `peak_bytes` is MLX's peak memory since a request last started while no other ran; on a CPU the process's.
    - `drafted`: the in-process drafter's proposal for this round, if one was requested. `accepted` counts tokens of it
      and of Verify's proposal.
    - `logprobs` are those of the committed tokens, if the request asked for them; `prompt_logprobs`, sent with the
      first token, those of the prompt after its first token.
    """

    accepted: Count
    bonus: Token
    work: Span
    idle_ns: Nanoseconds = 0
    next_proposal: DraftTokens | None = None
    rows: Count = 1
    peak_bytes: Serial = 0
    drafted: InProcessDraft | None = None
    logprobs: Logprobs | None = None
    path: Path | None = None
    prompt_logprobs: Logprobs | None = None


class Features(EpochMessage, frozen=True):
    """Target -> orchestrator -> drafters that read them: `rows` of committed tokens, the first of them at `position`.

    The rows feed the head in the draft worker. They are made from hidden states of the target's forward, in half
    precision, and are sent with the message that reports that forward: a prompt's rows while it is read, a round's
    before its Outcome. Hello says which rows each side means. A lost row delays nothing: the head continues with its
    own vectors.
    """

    position: Count
    rows: Halves


class Commit(RoundMessage, frozen=True):
    """Orchestrator -> drafters, sent together with Open or Verify.

    `tokens` were committed; with them `base_len` tokens are committed. `verifying` is the chain under verification
    (possibly empty): prepare up to `branches` of its outcomes, `depth` tokens each, and leave the `rank_offset`
    likeliest to other drafters. None: draft `depth` tokens that continue the committed text, and answer with Drafted.
    Report alternatives to a chain's tokens whose probability exceeds `min_prob`; 1: none.
    """

    tokens: Committed
    verifying: Chain | None
    depth: Depth
    branches: Breadth
    rank_offset: Breadth = 0
    min_prob: Real = 1.0


class Branches(RoundMessage, frozen=True):
    """Drafter -> orchestrator, unrequested: the branches for this round's outcomes at their present depth.

    `final`: nothing more will come for the round. `q` is what the chains' tokens were drawn from, one row a token,
    entry after entry; None: they were not drawn at random. `peak_bytes` is as in Outcome, for the drafter; 0: not
    known.
    """

    entries: Annotated[tuple[Branch, ...], Meta(max_length=MAX_BRANCHES)]
    work: Span
    final: bool = False
    q: SparseQ | None = None
    peak_bytes: Serial = 0

    @property
    def depth(self) -> int:
        """The number of tokens of the longest branch."""
        return max((len(entry.chain) for entry in self.entries), default=0)


class Drafted(RoundMessage, frozen=True):
    """Drafter -> orchestrator: the continuation requested by Commit(verifying=None), to be verified in `round`.

    `q` is what each of its tokens was drawn from; None: they were not drawn at random. `odds` is as in Branch.
    """

    chain: Chain
    work: Span
    q: SparseQ | None = None
    peak_bytes: Serial = 0
    alternatives: Alternatives | None = None
    odds: ChainOdds = ()


class Prefill(EpochMessage, frozen=True):
    """Orchestrator -> prefill worker: read these tokens for the target and send their keys and values from `start` on.

    The last token is left out, because the target feeds it. Close ends the work early.
    """

    tokens: Tokens
    start: Count


class PromptKv(EpochMessage, frozen=True):
    """Prefill worker -> orchestrator -> target: keys and values of `count` tokens of the text, from `start` on.

    `data` holds layer after layer, keys before values, [kv_heads, count, head_dim] in the model's number format.
    """

    start: Count
    count: Count
    data: Bytes


class Prefilled(EpochMessage, frozen=True):
    """Target -> orchestrator: how much of a long prompt it has read.

    `cached` is the number of its first tokens that came from the prompt cache; it is reported for short prompts, too.
    """

    done: Count
    total: Count
    cached: Count = 0


class Close(RequestMessage, frozen=True):
    """Orchestrator -> every worker: the request is over; free its slot."""


class Resync(EpochMessage, frozen=True):
    """Worker -> orchestrator: messages are missing; answer with Open and the committed tokens."""
