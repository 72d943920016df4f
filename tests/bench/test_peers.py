"""The processes of peers, such as llama.cpp, get the right arguments."""

import json
from pathlib import Path
from typing import NoReturn

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


def test_no_gguf_file_is_downloaded_for_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only llama.cpp reads the file. The cache may contain only the converted model, which mlx-lm reads."""

    def download(_: object) -> NoReturn:
        pytest.fail("a file was downloaded")

    monkeypatch.setattr(peers, "pull", download)
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    assert peers.choose_peers("mlx-lm", "smollm2", None) == peers.ChosenPeers(mlx_lm=True)
    monkeypatch.setattr(peers, "find_spec", lambda name: name == "mlx_lm" or None)
    found = peers.choose_peers(None, "smollm2", None)
    assert found.mlx_lm and found.gguf is None and "xllamacpp is not installed" in found.left_out[0]
