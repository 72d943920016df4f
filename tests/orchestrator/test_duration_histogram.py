"""Rounds and forwards are timed once each, and counted in the right buckets."""

from __future__ import annotations

from outrider.orchestrator.core.metrics import DurationHistogram, Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, ToFront
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import DraftTokens, Outcome, Span
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import DURATION_BOUNDS_MS
from tests.harness.settings import round_settings
from tests.orchestrator.test_branch_waits import RecordingWorkers


def test_bounds_are_inclusive_and_excess_goes_to_the_last_bucket() -> None:
    histogram = DurationHistogram()
    for bound in DURATION_BOUNDS_MS:
        histogram.add(int(bound * MILLISECOND_NS))
    histogram.add(int(DURATION_BOUNDS_MS[-1] * MILLISECOND_NS) + 1)
    found = histogram.snapshot()
    assert found.counts == (1,) * (len(DURATION_BOUNDS_MS) + 1)
    assert abs(found.seconds - (sum(DURATION_BOUNDS_MS) + DURATION_BOUNDS_MS[-1]) / 1000) < 1e-6


def test_shared_forward_counts_once_and_prompt_reading_not_at_all() -> None:
    scheduler = Scheduler(RecordingWorkers(), round_settings(4, 8, ngrams=False), list[ToFront]().append, Trace(None))
    ms = MILLISECOND_NS
    for name in ("a", "b"):
        scheduler.begin(Admit(name, (1, 2, 3), SamplingParams(max_tokens=50), "ar", frozenset()), 0)
    for number, (started, ended) in enumerate(((0, 4), (5, 7), (8, 11))):
        work = Span(started * ms, ended * ms)
        outcomes = [Outcome(name, 0, number, 3 + number, 0, 5, work, ms, DraftTokens()) for name in ("a", "b")]
        scheduler.handle([("target-0", one) for one in outcomes], ended * ms)
    rounds, verifies = scheduler.metrics.rounds.snapshot(), scheduler.metrics.verifies.snapshot()
    assert (sum(rounds.counts), round(1000 * rounds.seconds)) == (4, 2 * (3 + 4))
    assert (sum(verifies.counts), round(1000 * verifies.seconds)) == (2, 2 + 3)
