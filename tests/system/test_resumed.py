"""Real servers are disconnected and killed in the middle of texts: the next server continues the same text."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
    """The server that continues the texts has a draft model and is used throughout; the others draft by n-grams."""
    monkeypatch.setenv(MODEL, str(served.target))
    long = replace(resume.KILL_SAMPLING, max_tokens=200)  # so that a text is not over before its server is killed
    monkeypatch.setattr(resume, "KILL_SAMPLING", long)
    with LocalCluster(model=served.target, draft_model=served.draft) as draft_cluster:
        steady: list[bool] = []

        def cluster(**settings: Any) -> AbstractContextManager[LocalCluster]:
            if set(settings) == {"progress"}:
                steady.append(True)
                if len(steady) != 2:
                    return nullcontext(draft_cluster)
            return LocalCluster(model=served.target, **{"draft_backend": "ngram", **settings})

        monkeypatch.setattr(resume, "LocalCluster", cluster)
        found, cuts = resume.run_interrupted(5, 3, Screen())
        assert not [str(one) for one in found if one.verdict == DIFFERENT] and cuts.made > 2
        waits, differing = resume.run_kills(1, 3, Screen())
    assert len(steady) == 3 and len(waits) == 1 and differing == 0
