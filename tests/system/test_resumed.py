"""Real servers are disconnected and killed in the middle of texts: the next server continues the same text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider import LocalCluster
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.model_files import MODEL_VARIABLE as MODEL
from tests.harness import resume
from tests.harness.random_identity import DIFFERENT
from tests.tiny import Pair


def test_broken_connections_and_a_killed_server_change_no_text(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def cluster(**settings: Any) -> LocalCluster:
        draft = {"draft_backend": "ngram"} if "endpoint" in settings else {"draft_model": served.draft}
        draft = {} if "draft_backend" in settings else draft
        return LocalCluster(model=served.target, **draft, **settings)

    monkeypatch.setenv(MODEL, str(served.target))
    monkeypatch.setattr(resume, "LocalCluster", cluster)
    monkeypatch.setattr(resume, "KILLED", replace(resume.KILLED, max_tokens=200))  # one that is killed has not ended
    found, cuts = resume.broken(5, 3, Screen())
    assert not [str(one) for one in found if one.verdict == DIFFERENT] and cuts.made > 2
    waits, others = resume.kills(1, 3, Screen())
    assert len(waits) == 1 and others == 0
