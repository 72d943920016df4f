"""A target is not sent messages that it can't handle, and a note gives the reason."""

from __future__ import annotations

import pytest

from outrider.orchestrator.events import RequestBegan
from outrider.protocol.messages import Abilities, Verify
from tests.orchestrator.cluster_in_process import Cluster

pytestmark = pytest.mark.usefixtures("counted_clock")

TEXT = tuple(range(1, 90))
WHY = "a plamo3 model can't verify several tokens at once, so it decodes token by token"


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_a_target_without_chains_decodes_plainly_in_every_mode(mode: str) -> None:
    cluster = Cluster(TEXT, None)
    cluster.target_abilities = Abilities(chains=False, why=WHY)
    cluster.worker_notes = [f"speculation is off: {WHY}"]
    ended = cluster.run(TEXT[:5], 40, mode)
    assert cluster.generated == list(TEXT[5:45])
    assert not any(message.chain or message.draft for message in cluster.sent_to_target if isinstance(message, Verify))
    began = next(event for event in cluster.events if isinstance(event, RequestBegan))
    assert began.mode == "ar"
    assert [*began.notes, *ended.notes].count(cluster.worker_notes[0]) == (0 if mode == "ar" else 2)
