"""Every message is one frozen dataclass. The types of its fields say what they may hold (`protocol.schema`)."""

from __future__ import annotations

from outrider.protocol.messages.clients import (
    Cancel,
    Done,
    DraftWork,
    Failed,
    Generate,
    Progress,
    RoundRecord,
    Started,
    Stats,
    StatsQuery,
    TextChunk,
    Timings,
    WorkerStats,
)
from outrider.protocol.messages.ranks import RankHello, TextChange, TextFeed, TextForward
from outrider.protocol.messages.rounds import (
    Alternatives,
    Branch,
    Branches,
    Close,
    Commit,
    Drafted,
    Features,
    Halt,
    Open,
    Outcome,
    Prefill,
    Prefilled,
    Prepare,
    PromptKv,
    Resync,
    Span,
    Verify,
)
from outrider.protocol.messages.workers import (
    CacheReport,
    Fault,
    Hello,
    KvMemory,
    Loading,
    Ping,
    Pong,
    Shutdown,
    Welcome,
    WorkerNote,
)

Message = (
    Hello
    | Welcome
    | KvMemory
    | CacheReport
    | Loading
    | Ping
    | Pong
    | Fault
    | WorkerNote
    | Shutdown
    | Open
    | Verify
    | Halt
    | Prepare
    | Outcome
    | Features
    | Commit
    | Branches
    | Drafted
    | Prefill
    | PromptKv
    | Prefilled
    | Close
    | Resync
    | Generate
    | Started
    | Progress
    | TextChunk
    | Done
    | Failed
    | Cancel
    | StatsQuery
    | Stats
    | RankHello
    | TextChange
    | TextForward
)

__all__ = [
    "Alternatives",
    "Branch",
    "Branches",
    "CacheReport",
    "Cancel",
    "Close",
    "Commit",
    "Done",
    "DraftWork",
    "Drafted",
    "Failed",
    "Fault",
    "Features",
    "Generate",
    "Halt",
    "Hello",
    "KvMemory",
    "Loading",
    "Message",
    "Open",
    "Outcome",
    "Ping",
    "Pong",
    "Prefill",
    "Prefilled",
    "Prepare",
    "Progress",
    "PromptKv",
    "RankHello",
    "Resync",
    "RoundRecord",
    "Shutdown",
    "Span",
    "Started",
    "Stats",
    "StatsQuery",
    "TextChange",
    "TextChunk",
    "TextFeed",
    "TextForward",
    "Timings",
    "Verify",
    "Welcome",
    "WorkerNote",
    "WorkerStats",
]
