"""Every message, one frozen dataclass each. What a field may hold is in its type (`protocol.fields`).

Hot-path messages carry `request`, `epoch`, `round` and `base_len`. `base_len` is the number of committed tokens when
the round's verify starts, so chain token i stands at absolute position base_len + i. Times are `time.monotonic_ns`
of the sender's machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.fields import (
    MAX_BRANCHES,
    Chain,
    Choice,
    Committed,
    Count,
    Floats,
    Mode,
    Name,
    Nanoseconds,
    RequestId,
    Role,
    Serial,
    Size,
    Text,
    Token,
    Tokens,
)
from protocol.sampling import SamplingParams
from protocol.sparse import SparseQ

# --- between the orchestrator and its workers ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of evaluated work: when it started and ended."""

    started_ns: Nanoseconds
    ended_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker -> orchestrator, first: who I am and what I run. `incarnation` differs at each start of the process."""

    role: Role
    name: Name
    incarnation: Serial
    pid: Count
    backend: Name
    model: Name
    vocab_size: Count
    context_length: Count
    parameters: Serial
    weight_bytes: Serial
    note: Name = ""


@dataclass(frozen=True, slots=True)
class Loading:
    """Worker -> orchestrator, before Hello: how far the start is, for a person to read."""

    role: Role
    stage: Name


@dataclass(frozen=True, slots=True)
class Open:
    """Orchestrator -> every worker: a request begins (or begins again) from these tokens.

    The verify of an empty chain: the target answers Outcome(round 0, accepted 0, bonus). Drafters prepare branches for
    the outcomes of `verifying`, normally the empty chain of round 0; None: only read the tokens. `eos` are the tokens
    that end this request (empty when it ignores them): no outcome worth preparing.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    tokens: Tokens
    sampling: SamplingParams
    eos: Chain = ()
    depth: Count = 0
    branches: Count = 0
    verifying: Chain | None = None


@dataclass(frozen=True, slots=True)
class Verify:
    """Orchestrator -> target: one forward over the last committed token plus `chain`.

    `run_ahead` = n lets the target go on by itself for n further single-token rounds, one Outcome each, until any other
    message for the request arrives. `kind` says how the chain was proposed and so which rule verifies it: by equality,
    or by rejection sampling against a certain proposal (one-hot) or against `q`, which a sparse one was drawn from.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    chain: Chain
    run_ahead: Count = 0
    kind: Annotated[str, Choice(("coupled", "one-hot", "sparse"))] = "coupled"
    q: SparseQ | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Target -> orchestrator: `accepted` chain tokens hold, then `bonus`. `idle_ns`: how long the target had waited."""

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    accepted: Count
    bonus: Token
    work: Span
    idle_ns: Nanoseconds = 0
    logprobs: Floats | None = None
    features: Floats | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Orchestrator -> drafters, in the same breath as Verify.

    `tokens` became final; with them `base_len` tokens are committed. `verifying` is the chain under verification
    (possibly empty): prepare up to `branches` of its outcomes, `depth` tokens each. None: draft the continuation of the
    committed text, `depth` tokens, and answer with Drafted.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    tokens: Committed
    verifying: Chain | None
    depth: Count
    branches: Count


@dataclass(frozen=True, slots=True)
class Branch:
    """The chain drafted for the outcome (`accepted`, `bonus`)."""

    accepted: Count
    bonus: Token
    chain: Chain


@dataclass(frozen=True, slots=True)
class Branches:
    """Drafter -> orchestrator, unasked: the branches of this round's outcomes as deep as they are by now.

    `final` says that nothing more will come for the round. `q`: what the chains' tokens were drawn from, a row a token,
    entry after entry; None: they were not drawn by chance.
    """

    request: RequestId
    epoch: Serial
    round: Serial
    base_len: Count
    depth: Count
    entries: Annotated[tuple[Branch, ...], Size(MAX_BRANCHES)]
    work: Span
    final: bool = False
    q: SparseQ | None = None


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


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Worker -> orchestrator: how much of a long prompt has been read."""

    request: RequestId
    epoch: Serial
    done: Count
    total: Count


@dataclass(frozen=True, slots=True)
class Close:
    """Orchestrator -> every worker: the request is over; free its slot."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Resync:
    """Worker -> orchestrator: something was missed; answer with Open and the committed tokens."""

    request: RequestId
    epoch: Serial


@dataclass(frozen=True, slots=True)
class Ping:
    """Orchestrator -> a worker's heartbeat thread."""

    serial: Serial


@dataclass(frozen=True, slots=True)
class Pong:
    """Worker's heartbeat thread -> orchestrator. `progress` grows while the worker moves, busy or waiting."""

    name: Name
    serial: Serial
    progress: Serial


@dataclass(frozen=True, slots=True)
class Fault:
    """Worker -> orchestrator: what went wrong; with `request` only that request is lost, without it the worker is."""

    name: Name
    request: RequestId | None
    message: Text


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Orchestrator -> worker: end now, in order."""


# --- between a client and the orchestrator ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """Client -> orchestrator: complete `prompt` (or `tokens`). None for a setting means the server's own."""

    request: RequestId
    prompt: Text | None
    tokens: Tokens | None
    sampling: SamplingParams
    mode: Mode = "auto"
    num_draft_tokens: Count | None = None
    branches: Count | None = None
    chat_template: bool = True


@dataclass(frozen=True, slots=True)
class Started:
    """Orchestrator -> client: admitted. `seed` is the one in force; `notes` are reasons worth a line each."""

    request: RequestId
    prompt_tokens: Count
    mode: Mode
    seed: Serial
    model: Name
    draft_model: Name
    notes: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Orchestrator -> client: how much of a long prompt the target has read."""

    request: RequestId
    done: Count
    total: Count


@dataclass(frozen=True, slots=True)
class Chunk:
    """Orchestrator -> client: committed text, never cut inside a character, and the tokens committed since the last."""

    request: RequestId
    text: Text
    token_ids: Tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """A request in numbers, named as llama.cpp names them; milliseconds. Tokens past the end do not count.

    `draft_n` chain tokens were verified in `draft_rounds` rounds that carried a chain, `draft_n_accepted` held.
    Hits and misses count rounds whose next chain was looked up in the speculation cache. `rounds` counts every verify.
    """

    prompt_n: Count = 0
    prompt_ms: float = 0.0
    predicted_n: Count = 0
    predicted_ms: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: Count = 0
    draft_n_accepted: Count = 0
    draft_rounds: Count = 0
    rounds: Count = 0
    cache_hits: Count = 0
    cache_misses: Count = 0
    ngram_chains: Count = 0
    draft_waits: Count = 0
    accepted_by_position: tuple[Count, ...] = ()
    drafted_by_position: tuple[Count, ...] = ()
    turnaround_ms: tuple[float, ...] = ()
    verify_ms: float = 0.0
    idle_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """Orchestrator -> client: the request ended well. `reason` is eos, stop, length or cancelled."""

    request: RequestId
    reason: Annotated[str, Choice(("eos", "stop", "length", "cancelled"))]
    timings: Timings
    notes: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Orchestrator -> client: the request ended badly; `kind` names the error class in protocol.errors."""

    request: RequestId
    kind: Name
    message: Text


@dataclass(frozen=True, slots=True)
class Cancel:
    """Client -> orchestrator: nobody wants the rest."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Client -> orchestrator: tell your workers and totals."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as the orchestrator sees it. `state` is starting, ready, lost or frozen."""

    role: Role
    name: Name
    state: Name
    pid: Count
    backend: Name
    model: Name
    vocab_size: Count
    context_length: Count
    parameters: Serial
    weight_bytes: Serial
    note: Name


@dataclass(frozen=True, slots=True)
class Stats:
    """Orchestrator -> client: workers, totals since the start, and messages dropped as stale."""

    request: RequestId
    version: Name
    workers: tuple[WorkerStats, ...]
    active: Count
    queued: Count
    finished: Count
    failed: Count
    totals: Timings
    stale_messages: Count
    rejected_frames: Count


Message = (
    Hello | Loading | Open | Verify | Outcome | Commit | Branches | Drafted | Prefilled | Close | Resync | Ping | Pong
    | Fault | Shutdown | Generate | Started | Progress | Chunk | Done | Failed | Cancel | StatsQuery | Stats
)
