"""Fixtures of the orchestrator's tests: the tiny pair's tokenizer, scripted servers, model folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.socket_files import PrivateDirectory
from tests.orchestrator.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return load_codec(find_model(str(TINY_TARGET)))


@pytest.fixture
def endpoint() -> Iterator[str]:
    with PrivateDirectory() as directory:
        yield directory.endpoint("clients")


@pytest.fixture
def make_server(endpoint: str) -> Iterator[Callable[..., ScriptedServer]]:
    """`make_server(**settings) -> ScriptedServer`, which is not started yet."""
    servers: list[ScriptedServer] = []

    def make(**settings: object) -> ScriptedServer:
        pair = choose_pair(ServeSettings(**settings))  # type: ignore[arg-type]
        servers.append(ScriptedServer(pair, load_pair(pair), endpoint))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    """A scripted server that runs one request at a time and queues the others."""
    return make_server(max_active=1).start()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a model's configuration and tokenizer, and an empty file of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_TARGET / name).read_bytes())
    (folder / "model.safetensors").write_bytes(b"")
    return folder
