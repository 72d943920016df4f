"""A drafter in virtual time whose forward over all branches takes longer than a verify still has hits."""

from __future__ import annotations

import pytest

from tests.bench.virtual_time import VirtualCluster, random_texts
from tools.latency import Latency
from tools.simulation.profile import Profile

VERIFY = Latency(((1, 11.0), (5, 19.0), (13, 36.0)))


@pytest.mark.parametrize(
    ("first_row_ms", "row_ms", "branches"),
    [(4.0, 1.0, 12), (3.0, 1.0, 8)],
    ids=["longer than a plain step", "about as long as a plain step"],
)
def test_likeliest_branches_come_in_time(first_row_ms: float, row_ms: float, branches: int) -> None:
    draft = Latency(((1, first_row_ms), (17, first_row_ms + 16 * row_ms)))
    machine = Profile("costly rows", ("none",), VERIFY, draft, 0.0, (0.6,), (0.45, 0.2, 0.1, 0.05))
    texts = random_texts(2, 260)
    cluster = VirtualCluster(machine, texts, depth=4, branches=branches, hop_ms=0.5)
    _, timings = (cluster.run(text, 240, "ssd") for text in texts)
    assert timings.cache_hits > 0.4 * (timings.cache_hits + timings.cache_misses)
