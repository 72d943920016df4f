"""What the front has counted since the start: requests by their ends, tokens, and the sum of all timings.

`add`: the sum of all requests since the start, as the statistics tell it.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from outrider.protocol.messages import Done, Failed, Timings
from outrider.protocol.stats import Tally


def add(total: Timings, one: Timings) -> Timings:
    """Counts and times add up; rates are weighed by their times. Turnarounds are a request's own and are left out."""
    predicted_ms = total.predicted_ms + one.predicted_ms
    made = total.predicted_per_second * total.predicted_ms + one.predicted_per_second * one.predicted_ms
    return Timings(
        prompt_n=total.prompt_n + one.prompt_n,
        cache_n=total.cache_n + one.cache_n,
        draft_cache_n=total.draft_cache_n + one.draft_cache_n,
        queue_ms=total.queue_ms + one.queue_ms,
        prompt_ms=total.prompt_ms + one.prompt_ms,
        predicted_n=total.predicted_n + one.predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_second=made / predicted_ms if predicted_ms > 0 else 0.0,
        draft_n=total.draft_n + one.draft_n,
        draft_n_accepted=total.draft_n_accepted + one.draft_n_accepted,
        draft_rounds=total.draft_rounds + one.draft_rounds,
        rounds=total.rounds + one.rounds,
        cache_hits=total.cache_hits + one.cache_hits,
        cache_misses=total.cache_misses + one.cache_misses,
        cache_late=total.cache_late + one.cache_late,
        missed_then_plain=total.missed_then_plain + one.missed_then_plain,
        missed_then_copied=total.missed_then_copied + one.missed_then_copied,
        missed_then_drafted=total.missed_then_drafted + one.missed_then_drafted,
        ngram_chains=total.ngram_chains + one.ngram_chains,
        draft_waits=total.draft_waits + one.draft_waits,
        accepted_by_position=each(total.accepted_by_position, one.accepted_by_position),
        drafted_by_position=each(total.drafted_by_position, one.drafted_by_position),
        looked_up_by_accepted=each(total.looked_up_by_accepted, one.looked_up_by_accepted),
        hits_by_accepted=each(total.hits_by_accepted, one.hits_by_accepted),
        verify_ms=total.verify_ms + one.verify_ms,
        idle_ms=total.idle_ms + one.idle_ms,
        peak_bytes=max(total.peak_bytes, one.peak_bytes),
        resumed=total.resumed + one.resumed,
        rejoined=total.rejoined + one.rejoined,
        draft_n_accepted_by=by_name(total.draft_n_accepted_by, one.draft_n_accepted_by),
        draft_n_accepted_from=by_name(total.draft_n_accepted_from, one.draft_n_accepted_from),
    )


def by_name(left: tuple[Tally, ...], right: tuple[Tally, ...]) -> tuple[Tally, ...]:
    """The sum of each name."""
    counts: Counter[str] = Counter()
    for tally in (*left, *right):
        counts[tally.name] += tally.count
    return tuple(Tally(name, count) for name, count in sorted(counts.items()))


def each(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The sum at each place."""
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


class ServerMetrics:
    """One server's. `tokens`: made so far, for requests that still run, too."""

    def __init__(self) -> None:
        self.totals = Timings()
        self.tokens = 0
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    @property
    def finished(self) -> int:
        return self._done.total()

    @property
    def failed(self) -> int:
        return self._failed.total()

    def on_ended(self, last: Done | Failed) -> None:
        """A request's last word."""
        if isinstance(last, Done):
            self._done[last.reason] += 1
            self.totals = add(self.totals, last.timings)
        else:
            self._failed[last.kind] += 1

    def endings(self) -> tuple[Tally, ...]:
        """By reason, or by kind of error."""
        return tuple(Tally(how, count) for how, count in (*list(self._done.items()), *list(self._failed.items())))
