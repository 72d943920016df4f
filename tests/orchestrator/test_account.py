"""The metrics of a request count its tokens by source, and nothing after the last token."""

from __future__ import annotations

import pytest
from msgspec import structs

from outrider.orchestrator.core.metrics import MAX_RECENT_ROUNDS, RequestMetrics
from outrider.orchestrator.core.proposal import Lookup, Proposal
from outrider.protocol.messages import Outcome, Span, Timings
from outrider.protocol.schema import Origin
from outrider.protocol.stats import MAX_COUNTED_NAMES
from tests.orchestrator.rounds import make_settled_round

HIT = Proposal((1, 2, 3), Origin.PREPARED, lookup=Lookup.HIT)
SECOND_NS = 1_000_000_000


def make_metrics(rounds: int, accepted: int = 2) -> RequestMetrics:
    """Returns the metrics of the prompt's round and `rounds` hits of three tokens, of which `accepted` are accepted."""
    found = RequestMetrics(admitted_ns=SECOND_NS // 2)
    proposal = Proposal()
    for number in range(rounds + 1):
        outcome = Outcome("r", 0, number, 0, accepted if number else 0, 9, Span(0, 5_000_000), idle_ns=1_000_000)
        kept = accepted + 1 if number else 1
        found.on_ended(make_settled_round(number, proposal, outcome, kept), (number + 1) * SECOND_NS)
        proposal = HIT
    return found


@pytest.mark.parametrize("rounds", [1, 20, 500])
@pytest.mark.parametrize("later", [1, 3, MAX_RECENT_ROUNDS - 1])
def test_rounds_after_the_last_kept_token_are_not_counted(rounds: int, later: int) -> None:
    tokens = 1 + 3 * rounds
    found = make_metrics(rounds + later).timings(7, tokens)
    other = make_metrics(rounds).timings(7, tokens)
    assert found == other
    assert (found.rounds, found.draft_n_accepted, found.cache_hits) == (rounds + 1, 2 * rounds, rounds)
    assert found.predicted_ms == 1000.0 * rounds and found.prompt_ms == 500.0


@pytest.mark.parametrize(("kept", "drafted", "accepted"), [(1, 1, 1), (2, 2, 2), (3, 3, 2)])
def test_last_round_counts_only_tokens_before_the_end(kept: int, drafted: int, accepted: int) -> None:
    before, found = make_metrics(5).timings(7, 16), make_metrics(8).timings(7, 16 + kept)
    assert found.rounds == before.rounds + 1
    assert found.draft_n == before.draft_n + drafted
    assert found.draft_n_accepted == before.draft_n_accepted + accepted
    assert found.drafted_by_position == tuple(5 + (i < drafted) for i in range(3))


@pytest.mark.parametrize("asked", [False, True], ids=["at once", "asked for"])
@pytest.mark.parametrize(
    ("source", "lookup", "counts"),
    [
        (Origin.TARGET, Lookup.MISS, (1, 0, 0, 0)),
        (Origin.COPIED, Lookup.MISS, (0, 1, 0, 0)),
        (Origin.DRAFTED, Lookup.MISS, (0, 0, 1, 0)),
        (Origin.HEAD, Lookup.MISS, (0, 0, 1, 0)),
        (Origin.PREPARED, Lookup.LATE, (0, 0, 0, 1)),
        (Origin.COPIED, Lookup.LATE, (0, 0, 0, 1)),
    ],
)
def test_a_miss_is_counted_by_its_fallback(
    source: Origin, lookup: Lookup, counts: tuple[int, ...], asked: bool
) -> None:
    found = make_metrics(3)
    outcome = Outcome("r", 0, 4, 0, 0, 9, Span(0, 1))
    found.on_ended(make_settled_round(4, Proposal((1,), source, lookup), outcome, 1, waited=asked), 9 * SECOND_NS)
    times = found.timings(7, 11)
    followed = (times.missed_then_plain, times.missed_then_copied, times.missed_then_drafted, times.cache_late)
    assert followed == counts and (times.cache_misses, times.draft_waits) == (1, asked)


def test_peak_bytes_is_the_sum_of_each_workers_peak() -> None:
    found = make_metrics(2)
    for worker, peak_bytes in (("target-0", 50), ("draft-0", 7), ("target-0", 40), ("draft-1", 3)):
        found.on_peak_memory(worker, peak_bytes)
    assert found.timings(7, 4).peak_bytes == 60


def test_the_timings_of_requests_add_up():
    one = Timings(prompt_n=3, prefill_n=2, predicted_n=4, predicted_ms=10.0, predicted_per_second=300.0, peak_bytes=5)
    other = structs.replace(one, predicted_ms=20.0, predicted_per_second=150.0, peak_bytes=9)
    one = structs.replace(one, hits_by_accepted=(1, 2), draft_n_accepted_by={"a": 1, "b": 2})
    other = structs.replace(other, hits_by_accepted=(4,), draft_n_accepted_by={"b": 3})
    total = one + other
    assert (total.prompt_n, total.prefill_n, total.predicted_n, total.peak_bytes) == (6, 4, 8, 9)
    assert (total.predicted_ms, total.predicted_per_second) == (30.0, 200.0)
    assert total.hits_by_accepted == (5, 2) and total.draft_n_accepted_by == {"a": 1, "b": 5}


def test_totals_by_drafter_are_bounded() -> None:
    """Drafters with new names may join for months; the latest names are kept."""
    total = Timings(draft_n_accepted_by={"a": 1})
    for index in range(2 * MAX_COUNTED_NAMES):
        total += Timings(draft_n_accepted_by={"a": 1, f"draft-of-pod-{index}": 3})
    counts = total.draft_n_accepted_by
    assert len(counts) == MAX_COUNTED_NAMES and counts["a"] == 1 + 2 * MAX_COUNTED_NAMES
    assert counts[f"draft-of-pod-{2 * MAX_COUNTED_NAMES - 1}"] == 3
