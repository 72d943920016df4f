"""Messages about a worker itself, its start, its health, its end; and messages between the ranks of one target.

All ranks run the same model, each with a part of every layer, so every forward involves all ranks. Rank 0, which talks
to the orchestrator, tells the others what it feeds. No other process uses these messages.
"""

from __future__ import annotations

from typing import Annotated

from outrider.protocol.schema import (
    Count,
    Many,
    Message,
    Name,
    Nanoseconds,
    Real,
    Record,
    RequestId,
    Role,
    Serial,
    Text,
    Token,
    one_of,
)
from outrider.protocol.stats import CacheUse, KvCost

TextOperation = Annotated[str, one_of("open", "close", "mark", "roll back", "save", "adopt", "drop")]


class InProcessDrafter(Record, frozen=True):
    """A drafter in the target's process, under the name that Verify uses.

    `model` names its files. `is_head`: it reads the target's hidden states. `agreement` is the share of a trial text's
    tokens for which it proposed the target's own; -1: not tried. `weight` is the cost of a token of its chains relative
    to a step of the target, by their weights.
    """

    name: Name
    model: Name = ""
    is_head: bool = False
    agreement: Real = -1.0
    weight: Real = 0.0


class Abilities(Record, frozen=True):
    """What a target can do, found by checks when it is loaded; it is asked for nothing else. `chains`: it verifies
    several tokens in one forward and can roll back the rejected ones.

    Without `chains` it decodes one token at a time, and `why` explains it. `takes_kv`: it can continue from keys and
    values of a prefill worker. `trees`: it verifies trees of drafts, too. `ngrams`: it looks n-grams up itself, as the
    drafter `ngram`. `all_cores`: its forwards can also use the drafters' core while they are idle (`Verify.all_cores`).
    `drafters` are the others in its process; `left_out` has a sentence for each that was requested and can't be used,
    or whose drafts will rarely be accepted.
    """

    chains: bool = True
    takes_kv: bool = False
    why: Text = ""
    trees: bool = False
    ngrams: bool = False
    all_cores: bool = False
    drafters: Many[InProcessDrafter] = ()
    left_out: Many[Text] = ()


class WorkerInfo(Record, frozen=True):
    """A worker's process and model. `kv` is the memory cost of a text."""

    role: Role
    name: Name
    pid: Count
    backend: Name
    model: Name
    vocab_size: Count
    context_length: Count
    parameters: Serial
    weight_bytes: Serial
    note: Name = ""
    kv: KvCost = KvCost()


class Hello(WorkerInfo, Message, frozen=True, tag=True, kw_only=True):
    """Worker -> orchestrator, when its model is loaded: its identity and its model. The answer is Welcome or Shutdown.

    - `incarnation` identifies this process, also among its successors. In hexadecimal it is the routing id of the main
      socket; followed by `/heartbeat` it is that of the heartbeat socket.
    - `name` is the requested name, or empty.
    - `abilities` describes what a target can do, as measured; a drafter sets `left_out` only.
    - `vocabulary` is a digest of what a joining drafter's tokens stand for. It must equal the cluster's; empty: not
      checked.
    - `files` identifies a target's model (`protocol.digest`). `number_format` is what a target computes in.
    - `features` identifies the rows that a target sends in Features, or that a drafter reads; empty: none.
    """

    incarnation: Serial
    abilities: Abilities = Abilities()
    vocabulary: Name = ""
    files: Name = ""
    features: Name = ""
    number_format: Name = ""


class Welcome(Message, frozen=True):
    """Orchestrator -> a worker that said Hello: it has joined the cluster under this name.

    `ping_ms` is the interval of the pings.
    """

    name: Name
    ping_ms: Count = 0


class KvMemory(Message, frozen=True):
    """Orchestrator -> worker, when all have joined and at each change: `limit` bytes for all its texts together.

    `prompt_cache`: ended texts may stay cached in the memory that running texts do not need.
    """

    limit: Serial
    prompt_cache: bool = True


class CacheReport(Message, frozen=True):
    """Worker -> orchestrator: the use of its prompt cache, when it has changed."""

    use: CacheUse


class Loading(Message, frozen=True):
    """Worker -> orchestrator, before Hello: the stage of the start, as text for a person."""

    stage: Name


class Ping(Message, frozen=True):
    """Orchestrator -> a worker's heartbeat thread."""

    serial: Serial


class Pong(Message, frozen=True):
    """Worker's heartbeat thread -> orchestrator. `progress` grows while the worker makes progress, busy or waiting.

    `expected_ms` is the longest that the current work should take until `progress` grows again; 0: not known.
    `clock_ns` is the worker's current time, by the clock of its spans.
    """

    serial: Serial
    progress: Serial
    expected_ms: Count = 0
    clock_ns: Nanoseconds = 0


class Fault(Message, frozen=True):
    """Worker -> orchestrator: an error. With `request` only that request is lost, in this `epoch`; without it the
    worker is.

    `dispensable`: nothing is broken, but the worker is of no use here, and the others may start without it.
    """

    request: RequestId | None
    message: Text
    dispensable: bool = False
    epoch: Serial = 0


class WorkerNote(Message, frozen=True):
    """Worker -> orchestrator: a note for the readers of the texts under way. Nothing is lost."""

    message: Text


class Shutdown(Message, frozen=True):
    """Orchestrator -> worker: end in an orderly way. A `reason` means that it was rejected."""

    reason: Text = ""


class RankHello(Message, frozen=True):
    """A rank -> rank 0, before it loads anything, and again after it has checked the model, with what it `found`.

    `runs` names the releases of the computing libraries, `weights` is a digest of the model's files, and `host`
    identifies the machine.
    """

    rank: Count
    size: Count
    host: Name
    runs: Text
    weights: Name
    found: Text = ""


class TextChange(Message, frozen=True):
    """Rank 0 -> a rank: a change to the text with the number `text`.

    `length` is the length it was rolled back to, or the length that was saved or adopted. `copy` is the number of the
    copy that was saved, adopted or dropped.
    """

    operation: TextOperation
    text: Count = 0
    length: Count = 0
    copy: Count = 0


class TextFeed(Record, frozen=True):
    """The next tokens of a text; the last `num_logits` of them get logits. Without `tokens` the collective delivers
    `count`.

    `prompt`: the tokens are a piece of a prompt.
    """

    text: Count
    tokens: Many[Token]
    count: Count
    num_logits: Count
    prompt: bool


class TextForward(Message, frozen=True):
    """Rank 0 -> a rank: the forward that all ranks run now."""

    feeds: Many[TextFeed]
