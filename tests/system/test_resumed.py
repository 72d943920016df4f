"""Real servers are disconnected and killed in the middle of texts: the next server continues the same text."""

from __future__ import annotations

from outrider.orchestrator.cli.terminal import Screen
from tests.harness.random_identity import DIFFERENT
from tests.harness.resume import broken, kills


def test_broken_connections_and_a_killed_server_change_no_text() -> None:
    found, cuts = broken(5, 3, Screen())
    assert not [str(one) for one in found if one.verdict == DIFFERENT] and cuts.made > 2
    waits, others = kills(1, 3, Screen())
    assert len(waits) == 1 and others == 0
