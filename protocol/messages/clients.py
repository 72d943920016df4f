"""Messages between a client and the orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import Annotated, Any

from msgspec import Meta, field

from outrider.protocol.messages.rounds import RequestMessage, Span
from outrider.protocol.messages.workers import WorkerInfo
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import (
    MAX_ITEMS,
    Count,
    Logprobs,
    Many,
    Name,
    Origin,
    Real,
    Record,
    RequestId,
    Serial,
    Text,
    Token,
    Tokens,
    one_of,
)
from outrider.protocol.stats import CacheUse, Durations, KvUse, add_counts, add_rows

Mode = Annotated[str, one_of("auto", "ar", "sd", "ssd")]
ClientName = Annotated[str, Meta(max_length=64)]
Counts = Annotated[dict[Name, Serial], Meta(max_length=MAX_ITEMS)]
"""How often each of these was seen, by name."""

ChunkTokens = Many[Token]
"""The tokens of a chunk, in the header: a client that just woke up needs as long for an array as for all the rest."""

FIELD_ADDERS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(
        ("accepted_by_position", "drafted_by_position", "looked_up_by_accepted", "hits_by_accepted"), add_rows
    ),
    **dict.fromkeys(("draft_n_accepted_by", "draft_n_accepted_from"), add_counts),
    "peak_bytes": max,
}
"""How to add the fields of `Timings` that are not plain sums."""


class Generate(RequestMessage, frozen=True):
    """Client -> orchestrator: complete `prompt` (or `tokens`). Mode auto and a setting of None are the server's.

    `origins` asks for the origin of each token, `rounds` for a record of each round when it ends. `drafter` names the
    only drafter to use; empty means all. `client` names the end user where one client serves several, who then take
    turns; empty means the client itself.

    To resume a text, send the tokens received so far as `resume_tokens`, the number of characters received as
    `resume_chars`, and the original seed in `sampling`. The reply holds only what is new. `resume_chars` may exceed
    what the tokens complete if the text had ended. `fingerprint` is the one from Started; a server with another refuses
    the request (OtherModel).
    """

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


class Started(RequestMessage, frozen=True):
    """Orchestrator -> client: the request is admitted. `seed` is the seed in use; `notes` are one-line explanations.

    `fingerprint` identifies the weights, the number format of the computation and the tokenizer. Servers with equal
    fingerprints can continue each other's texts. Empty: not known.
    """

    prompt_tokens: Count
    mode: Mode
    seed: Serial
    model: Name
    draft_model: Name
    notes: Many[Name] = ()
    fingerprint: Name = ""


class Progress(RequestMessage, frozen=True):
    """Orchestrator -> client: how many tokens of a long prompt the target has read."""

    done: Count
    total: Count


class DraftWork(Record, frozen=True):
    """A drafter's work for `round`: `branches` are now `depth` deep. 0 branches: a chain on request, or nothing yet."""

    drafter: Name
    round: Serial
    depth: Count
    branches: Count
    work: Span


class RoundRecord(Record, frozen=True):
    """A round that has ended. Spans are in nanoseconds since the request began.

    `lookup` is the result of looking up the previous outcome in the speculation cache. `source` is where the chain came
    from. `drafted` tokens were verified, `accepted` of them were accepted, and the round committed `tokens`. `verify`
    is the target's forward. `decided` runs from the previous outcome until the orchestrator sent the chain, or learned
    that the target had continued with it; None: the target continued autonomously. `drafting` is the drafters' work
    that no earlier record reported.
    """

    round: Serial
    lookup: Annotated[str, one_of("none", "hit", "grown", "late", "miss")]
    source: Annotated[str, one_of("none", "cache", "drafter", "ngram", "head")]
    drafted: Count
    accepted: Count
    tokens: Count
    verify: Span
    decided: Span | None = None
    drafting: Many[DraftWork] = ()


class TextChunk(RequestMessage, frozen=True):
    """Orchestrator -> client: committed text, never cut inside a character, and the tokens committed since the last
    chunk.

    `logprobs`, `origins` and `rounds` are present if the request asked for them, and so are `prompt_logprobs`, of the
    prompt after its first token, in the first chunk. Origins are 0 target, 1 prepared, 2
    drafted on request, 3 an n-gram of the text or a table, 4 drafted by a head, 5 an alternative of a tree. `rounds`
    are those that produced the tokens.
    """

    text: Text
    token_ids: ChunkTokens
    logprobs: Logprobs | None = None
    origins: Many[Origin] | None = None
    rounds: Many[RoundRecord] | None = None
    prompt_logprobs: Logprobs | None = None


class Timings(Record, frozen=True):
    """Measurements of a request, named as llama.cpp names them; times in milliseconds. Tokens past the end don't count.

    - Prompt: `cache_n` tokens came from the target's prompt cache, `prompt_n` were read, `prefill_n` of these by a
      prefill worker. `draft_cache_n` came from a drafter's prompt cache.
    - Chains: `draft_n` tokens were verified in `draft_rounds` rounds with a chain, `ngram_chains` of them of n-grams;
      `draft_n_accepted` were accepted. `..._by_position` count both by position. `rounds` counts every verify.
    - Speculation cache: `cache_hits` and `cache_misses` count lookups; a hit found its branch in time. In `cache_late`
      misses the branch arrived during the wait. After the others the target decoded plainly, or verified a chain of
      n-grams, or one drafted on request or in its process (`missed_then_...`). `looked_up_by_accepted[k]`
      and `hits_by_accepted[k]` count outcomes with k accepted tokens. `draft_waits` rounds waited for a drafter.
    - `draft_n_accepted_by` counts accepted tokens by drafter, `draft_n_accepted_from` by `Origin`.
    - `queue_ms` is the time in the queue, `prompt_ms` that from admission to the first token, `predicted_ms` that from
      there to the last of `predicted_n` tokens; `predicted_per_second` is their rate, without the first. `verify_ms` is
      the target's time in verifies, `idle_ms` that between them, `turnaround_ms` the idle time before each hit.
    - `peak_bytes` is the peak memory of the target and its drafters, weights included: on a GPU MLX's, since the
      request, or the first of those that ran with it, began; on a CPU each process's, since its start.
    - `resumed` counts continuations on a new target, `rejoined` the drafters that came back during the text.
    """

    prompt_n: Serial = 0
    cache_n: Serial = 0
    draft_cache_n: Serial = 0
    queue_ms: Real = 0.0
    prompt_ms: Real = 0.0
    predicted_n: Serial = 0
    predicted_ms: Real = 0.0
    predicted_per_second: Real = 0.0
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
    accepted_by_position: Many[Serial] = ()
    drafted_by_position: Many[Serial] = ()
    looked_up_by_accepted: Many[Serial] = ()
    hits_by_accepted: Many[Serial] = ()
    turnaround_ms: Many[Real] = ()
    verify_ms: Real = 0.0
    idle_ms: Real = 0.0
    peak_bytes: Serial = 0
    resumed: Count = 0
    rejoined: Count = 0
    draft_n_accepted_by: Counts = field(default_factory=dict)
    prefill_n: Serial = 0
    draft_n_accepted_from: Counts = field(default_factory=dict)

    def __add__(self, other: Timings) -> Timings:
        """Adds counts and times; rates are weighted by their times, and the peak is the larger one.

        Turnarounds are left out, since they belong to one request.
        """
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        del pairs["turnaround_ms"]
        sums: dict[str, Any] = {name: FIELD_ADDERS.get(name, add)(*pair) for name, pair in pairs.items()}
        tokens = sum(timings.predicted_per_second * timings.predicted_ms for timings in (self, other))
        sums["predicted_per_second"] = tokens / sums["predicted_ms"] if sums["predicted_ms"] > 0 else 0.0
        return Timings(**sums)


class Done(RequestMessage, frozen=True):
    """Orchestrator -> client: the request succeeded. `reason` is eos, stop, length or cancelled."""

    reason: Annotated[str, one_of("eos", "stop", "length", "cancelled")]
    timings: Timings
    notes: Many[Name] = ()


class Failed(RequestMessage, frozen=True):
    """Orchestrator -> client: the request failed. `kind` names the error class in protocol.errors."""

    kind: Name
    message: Text


class Cancel(RequestMessage, frozen=True):
    """Client -> orchestrator: end the request early."""


class StatsQuery(RequestMessage, frozen=True):
    """Client -> orchestrator: send Stats, and whether this client's request `about` is known."""

    about: RequestId | None = None


class WorkerStats(WorkerInfo, frozen=True, kw_only=True):
    """One worker as the orchestrator sees it. `state` is starting, ready, refused, frozen, restarting or lost.

    `cache` is the use of the prompt cache, `restarts` the number of restarts. `invalid_messages` counts invalid
    messages by kind. `round_trip_ms` is the time from a ping to its answer. `fingerprint` identifies a target's weights
    and number format.
    """

    state: Name
    cache: CacheUse = CacheUse()
    restarts: Count = 0
    invalid_messages: Counts = field(default_factory=dict)
    round_trip_ms: Real = 0.0
    fingerprint: Name = ""


def is_serving(workers: Sequence[WorkerStats]) -> bool:
    """Whether requests are admitted: there is a target, and no worker is loading for the first time."""
    has_target = any(worker.role == "target" and worker.state == "ready" for worker in workers)
    return has_target and all(worker.state != "starting" for worker in workers)


class Stats(RequestMessage, frozen=True):
    """Orchestrator -> client: workers, totals since the start, and counts of dropped messages.

    `totals` covers requests that have ended; `generated` also counts the tokens of running ones. `endings` counts how
    requests ended: a reason of Done or a kind of Failed. `round_seconds` measures from a request's outcome to its next,
    `verify_seconds` the target's forwards, each counted once. `known` is False if the queried request neither runs nor
    waits on this server. `dropped_branches` counts drafter messages for which the speculation cache had no room.
    """

    version: Name
    workers: Many[WorkerStats]
    active: Count
    queued: Count
    finished: Serial
    failed: Serial
    totals: Timings
    stale_messages: Serial
    rejected_frames: Serial
    generated: Serial = 0
    endings: Counts = field(default_factory=dict)
    kv: KvUse = KvUse()
    round_seconds: Durations = Durations()
    verify_seconds: Durations = Durations()
    known: bool = True
    dropped_branches: Serial = 0
