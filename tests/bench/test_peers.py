"""Peers' processes get what their runner needs."""

import json
from pathlib import Path

import pytest

from outrider.bench.comparison import peers
from outrider.bench.helper import HelperProcess
from outrider.orchestrator.settings import ServeSettings


def test_llama_cpp_gets_the_file_the_threads_and_its_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, object]] = []

    def record(_: object, module: str, peer: str, given: str, threads: int) -> None:
        started.append({"module": module, "peer": peer, **json.loads(given)})

    monkeypatch.setattr(HelperProcess, "__init__", record)
    monkeypatch.setattr(HelperProcess, "pid", 0)
    monkeypatch.setattr(peers.system, "assign_core", lambda *_: None)
    speculation = peers.LlamaSpeculation("draft-simple", {"n_max": 3})
    peers.llama_cpp(ServeSettings(threads=2), Path("m.gguf"), speculation=speculation, draft=Path("d.gguf"))
    assert started == [
        {
            "module": "outrider.bench.helper",
            "peer": "outrider.bench.comparison.llama_cpp_peer:LlamaCpp",
            "model": "m.gguf",
            "draft_model": "d.gguf",
            "threads": 2,
            "slots": 1,
            "kind": "draft-simple",
            "settings": {"n_max": 3},
        }
    ]
