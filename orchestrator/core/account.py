"""What happened to one request, in counts and times. Knows nothing of how rounds are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.orchestrator.core.proposal import Proposal, Source
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Outcome, Timings

# A request tells at most this many single turnarounds; the sums go on.
MAX_TURNAROUNDS = 10_000


@dataclass(slots=True)
class Account:
    """Counts and times of one request; `timings` gives them their public names."""

    admitted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    rounds: int = 0
    chains: int = 0
    drafted: int = 0
    accepted: int = 0
    late: int = 0
    ngram_chains: int = 0
    waits: int = 0
    verify_ns: int = 0
    idle_ns: int = 0
    turnarounds_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    hits_at: Counter[int] = field(default_factory=Counter)
    misses_at: Counter[int] = field(default_factory=Counter)

    def proposed(self, proposal: Proposal, accepted: int) -> None:
        """What follows an outcome that accepted this many tokens."""
        if proposal.missed:
            self.missed(accepted)
            self.late += proposal.found
        elif proposal.found:
            self.hits_at[accepted] += 1
        self.ngram_chains += proposal.source is Source.NGRAM

    def missed(self, accepted: int) -> None:
        """A lookup found nothing."""
        self.misses_at[accepted] += 1

    def verified(self, chain: tuple[int, ...], accepted: int) -> None:
        """One round; tokens past the end of the request are not to be passed in."""
        self.rounds += 1
        self.chains += bool(chain)
        self.drafted += len(chain)
        self.accepted += accepted
        for position in range(len(chain)):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def took(self, proposal: Proposal, outcome: Outcome, now_ns: int) -> None:
        """A round's time in the target and the target's wait before it; the first outcome ends the prompt's time.

        The wait before the verify of a hit that was served at once is a turnaround.
        """
        self.last_ns = now_ns
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        if not self.first_ns:
            self.first_ns = now_ns
            return
        self.verify_ns += outcome.work.ended_ns - outcome.work.started_ns
        self.idle_ns += outcome.idle_ns
        at_once = proposal.found and not proposal.waited
        if at_once and len(self.turnarounds_ns) < MAX_TURNAROUNDS:
            self.turnarounds_ns.append(outcome.idle_ns)

    def timings(self, prompt_n: int, predicted_n: int) -> Timings:
        predicted_ms = max(self.last_ns - self.first_ns, 0) / MILLISECOND_NS
        positions = range(max(self.drafted_at, default=-1) + 1)
        looked_up = range(max((*self.hits_at, *self.misses_at), default=-1) + 1)
        # The first token belongs to the prompt's time, so the rate is that of the tokens after it (as mlx-lm counts).
        rate = (predicted_n - 1) / predicted_ms * 1000 if predicted_ms > 0 else 0.0
        return Timings(
            prompt_n=prompt_n,
            prompt_ms=max(self.first_ns - self.admitted_ns, 0) / MILLISECOND_NS,
            predicted_n=predicted_n,
            predicted_ms=predicted_ms,
            predicted_per_second=rate,
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
            draft_rounds=self.chains,
            rounds=self.rounds,
            cache_hits=self.hits_at.total(),
            cache_misses=self.misses_at.total(),
            cache_late=self.late,
            ngram_chains=self.ngram_chains,
            draft_waits=self.waits,
            accepted_by_position=tuple(self.accepted_at[i] for i in positions),
            drafted_by_position=tuple(self.drafted_at[i] for i in positions),
            looked_up_by_accepted=tuple(self.hits_at[k] + self.misses_at[k] for k in looked_up),
            hits_by_accepted=tuple(self.hits_at[k] for k in looked_up),
            turnaround_ms=tuple(ns / MILLISECOND_NS for ns in self.turnarounds_ns),
            verify_ms=self.verify_ns / MILLISECOND_NS,
            idle_ms=self.idle_ns / MILLISECOND_NS,
            peak_bytes=self.peak_bytes,
        )
