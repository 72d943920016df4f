"""Between a client and the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from outrider.protocol.messages.rounds import Span
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import (
    ClientName,
    Count,
    Logprobs,
    Mode,
    Name,
    OneOf,
    Origins,
    RequestId,
    Role,
    Serial,
    Text,
    Tokens,
    Told,
)
from outrider.protocol.stats import CacheUse, Durations, KvCost, KvUse, Tally


@dataclass(frozen=True, slots=True)
class Generate:
    """Client -> orchestrator: complete `prompt` (or `tokens`). None for a setting means the server's own.

    `origins`: tell with each token where it came from; `rounds`: tell of each round, when it has ended.
    `resume_tokens`: what was received of this very text before, with the seed of `sampling`: it goes on behind that,
    and only what is new is told. `resume_chars`: how many characters of text were received with it, which may be more
    than these tokens complete where the text had ended. `drafter`: the name of the only one that is to draft; empty:
    whoever is there. `fingerprint` is the one that its Started told: a server with another refuses it (OtherModel).
    `client`: for whom it is, where one client asks for many people, who take turns then; empty: for the client itself.
    """

    request: RequestId
    prompt: Text | None
    tokens: Tokens | None
    sampling: SamplingParams
    mode: Mode = "auto"
    num_draft_tokens: Count | None = None
    branches: Count | None = None
    chat_template: bool = True
    origins: bool = False
    rounds: bool = False
    resume_tokens: Tokens | None = None
    resume_chars: Count = 0
    drafter: Name = ""
    fingerprint: Name = ""
    client: ClientName = ""


@dataclass(frozen=True, slots=True)
class Started:
    """Orchestrator -> client: admitted. `seed` is the one in force; `notes` are reasons worth a line each.

    `fingerprint`: of the weights, the number format in which they compute, and the tokenizer; servers with the same go
    on with each other's texts. Empty: not known.
    """

    request: RequestId
    prompt_tokens: Count
    mode: Mode
    seed: Serial
    model: Name
    draft_model: Name
    notes: tuple[Name, ...] = ()
    fingerprint: Name = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Orchestrator -> client: how much of a long prompt the target has read."""

    request: RequestId
    done: Count
    total: Count


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a drafter did for `round`: so many `branches` are `depth` tokens deep now; 0: a chain that was asked for."""

    drafter: Name
    round: Serial
    depth: Count
    branches: Count
    work: Span


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round that has ended; spans are in nanoseconds since the request began.

    `lookup`: what the speculation cache had for the outcome before, `source`: where the chain of `drafted` tokens came
    from, `accepted` of which held; the round made `tokens` final. `verify` is the target's forward. `decided`: from the
    outcome before until the orchestrator had sent the chain, or knew that the target had gone on with it; None: the
    target went on by itself. `drafting`: what drafters did, as far as no record before has told it.
    """

    round: Serial
    lookup: Annotated[str, OneOf(("none", "hit", "grown", "late", "miss"))]
    source: Annotated[str, OneOf(("none", "cache", "drafter", "ngram", "head"))]
    drafted: Count
    accepted: Count
    tokens: Count
    verify: Span
    decided: Span | None = None
    drafting: tuple[DraftWork, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Orchestrator -> client: committed text, never cut inside a character, and the tokens committed since the last.

    `logprobs` and `origins` (0 target, 1 prepared, 2 drafted just in time, 3 copied from the text, 4 by a head) are
    those of the tokens, `rounds` those that brought them, if the request asked for them.
    """

    request: RequestId
    text: Text
    token_ids: Told
    logprobs: Logprobs | None = None
    origins: Origins | None = None
    rounds: tuple[RoundRecord, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """A request in numbers, named as llama.cpp names them; milliseconds. Tokens past the end do not count.

    The prompt's tokens are the `cache_n` that the target remembered and the `prompt_n` that it read; a drafter
    remembered `draft_cache_n` of them. Of the `prompt_n`, `prefill_n` were read by a prefill worker.
    `draft_n` chain tokens were verified in `draft_rounds` rounds that carried a chain, `draft_n_accepted` held.
    Hits and misses count outcomes that were looked up in the speculation cache: a hit had its branch there by then. For
    `cache_late` of the misses the branch came while it was waited for; after the others the target decoded plainly,
    verified a chain copied from the text, or one that a drafter was asked for (`missed_then_...`).
    `looked_up_by_accepted[k]` and `hits_by_accepted[k]` are of outcomes that accepted k tokens. `rounds` counts every
    verify. `queue_ms`: until it was the request's turn. `peak_bytes` is the most memory that MLX has held in the target
    and in its drafters since the request began, or the first of those that ran with it, weights included. `resumed`:
    how often the text went on on another target, the one before having died; `rejoined`: how often a drafter was taken
    back in the middle of it. `draft_n_accepted_by`: how many of each drafter's tokens held;
    `draft_n_accepted_from`: how many of each `Origin`.
    """

    prompt_n: Serial = 0
    cache_n: Serial = 0
    draft_cache_n: Serial = 0
    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_n: Serial = 0
    predicted_ms: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: Serial = 0
    draft_n_accepted: Serial = 0
    draft_rounds: Serial = 0
    rounds: Serial = 0
    cache_hits: Serial = 0
    cache_misses: Serial = 0
    cache_late: Serial = 0
    missed_then_plain: Serial = 0
    missed_then_copied: Serial = 0
    missed_then_drafted: Serial = 0
    ngram_chains: Serial = 0
    draft_waits: Serial = 0
    accepted_by_position: tuple[Serial, ...] = ()
    drafted_by_position: tuple[Serial, ...] = ()
    looked_up_by_accepted: tuple[Serial, ...] = ()
    hits_by_accepted: tuple[Serial, ...] = ()
    turnaround_ms: tuple[float, ...] = ()
    verify_ms: float = 0.0
    idle_ms: float = 0.0
    peak_bytes: Serial = 0
    resumed: Count = 0
    rejoined: Count = 0
    draft_n_accepted_by: tuple[Tally, ...] = ()
    prefill_n: Serial = 0
    draft_n_accepted_from: tuple[Tally, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Orchestrator -> client: the request ended well. `reason` is eos, stop, length or cancelled."""

    request: RequestId
    reason: Annotated[str, OneOf(("eos", "stop", "length", "cancelled"))]
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
    """Client -> orchestrator: tell your workers and totals, and whether you have this client's request `about`."""

    request: RequestId
    about: RequestId | None = None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as the orchestrator sees it. `state` is starting, ready, refused, frozen, restarting or lost.

    `kv`: what a text takes there; `cache`: how its prompt cache is used; `restarts`: how often it was started again;
    `lies`: how often it said what cannot be, by kind. `round_trip_ms`: from a ping to its answer; `clock_ahead_ms`: how
    far its machine's clock is before this one's. 0: not known. `fingerprint`: of a target's weights and number format.
    """

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
    kv: KvCost = field(default_factory=KvCost)
    cache: CacheUse = field(default_factory=CacheUse)
    restarts: Count = 0
    lies: tuple[Tally, ...] = ()
    round_trip_ms: float = 0.0
    clock_ahead_ms: float = 0.0
    fingerprint: Name = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """Orchestrator -> client: workers, totals since the start, and messages dropped as stale.

    `totals` are those of requests that have ended, `generated` the tokens of those that run, too. `endings` say how
    often requests ended so: by a reason of Done or a kind of Failed. `round_seconds`: from a request's outcome to its
    next; `verify_seconds`: the target's forwards, each once, whoever had a part in it. `known` is False where the
    request asked about neither runs nor waits here: another server had it. `dropped_branches`: messages of drafters for
    which the speculation cache had no room.
    """

    request: RequestId
    version: Name
    workers: tuple[WorkerStats, ...]
    active: Count
    queued: Count
    finished: Serial
    failed: Serial
    totals: Timings
    stale_messages: Serial
    rejected_frames: Serial
    generated: Serial = 0
    endings: tuple[Tally, ...] = ()
    kv: KvUse = field(default_factory=KvUse)
    round_seconds: Durations = field(default_factory=Durations)
    verify_seconds: Durations = field(default_factory=Durations)
    known: bool = True
    dropped_branches: Serial = 0
