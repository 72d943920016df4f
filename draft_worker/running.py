"""A request on this drafter: its work ahead, the commit that this belongs to, and how what came of it is told."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.continuation import Continuation
from outrider.drafting.growth import Ready, Wanted
from outrider.drafting.work_ahead import WorkAhead
from outrider.protocol.messages import Branches, Commit, Drafted, Open, Span


@dataclass(slots=True)
class Running:
    """`newest` is the word that its work belongs to, come at `committed_ns`; `owed`: it awaits DRAFTED."""

    work: WorkAhead
    newest: Open | Commit
    committed_ns: int
    owed: bool = False

    @classmethod
    def opened(cls, message: Open, work: WorkAhead, now_ns: int) -> Running:
        """It has read its text, and begins with the chain under verification."""
        work.commit((), _wanted(message))
        return cls(work, message, now_ns)

    @property
    def epoch(self) -> int:
        return self.newest.epoch

    def is_beyond(self, message: Open | Commit) -> bool:
        """Whether it works for a later round than this was said in."""
        return (message.epoch, message.round) < (self.epoch, self.newest.round)

    def gap(self, message: Commit) -> int:
        """How many tokens before those that it brings were missed; below 0: they are known already."""
        return message.base_len - len(message.tokens) - self.work.committed_len

    def is_next(self, message: Commit) -> bool:
        """Whether its round follows on the newest commit's, with chains under verification in both."""
        both = message.verifying is not None and bool(self.newest.verifying)
        return both and message.round == self.newest.round + 1

    def commit(self, message: Commit, now_ns: int) -> None:
        self.work.commit(message.tokens, _wanted(message))
        self.newest, self.committed_ns = message, now_ns
        self.owed = message.verifying is None and message.depth > 0

    def drafted(self, found: Continuation, work: Span, peak_bytes: int) -> Drafted:
        newest = self.newest
        return Drafted(
            request=newest.request,
            epoch=newest.epoch,
            round=newest.round,
            base_len=self.work.committed_len,
            chain=found.line,
            work=work,
            q=found.q,
            peak_bytes=peak_bytes,
            beside=found.beside,
        )

    def branches(self, ready: Ready, work: Span, peak_bytes: int) -> Branches:
        newest = self.newest
        return Branches(
            request=newest.request,
            epoch=newest.epoch,
            round=newest.round,
            base_len=self.work.committed_len,
            depth=ready.depth,
            entries=ready.entries,
            work=work,
            final=ready.final,
            q=ready.q,
            peak_bytes=peak_bytes,
        )


def _wanted(message: Open | Commit) -> Wanted:
    return Wanted(message.verifying, message.depth, message.branches, message.skip, message.least)
