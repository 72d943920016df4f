"""Fixtures of the orchestrator's tests: the tiny pair's tokenizer, fronts with a scripted core, model folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.socket_files import PrivateDirectory
from tests.orchestrator.stand import Stand


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return load_codec(find_model(str(TINY_TARGET)))


@pytest.fixture
def endpoint() -> Iterator[str]:
    with PrivateDirectory() as directory:
        yield directory.endpoint("clients")


@pytest.fixture
def make_stand(endpoint: str) -> Iterator[Callable[..., Stand]]:
    """`make_stand(**settings) -> Stand`, not started yet."""
    stands: list[Stand] = []

    def make(**settings: object) -> Stand:
        pair = choose_pair(ServeSettings(**settings))  # type: ignore[arg-type]
        stands.append(Stand(pair, load_pair(pair), endpoint))
        return stands[-1]

    yield make
    for stand in stands:
        stand.stop()


@pytest.fixture
def stand(make_stand: Callable[..., Stand]) -> Stand:
    """One request at a time: the others wait in line."""
    return make_stand(max_active=1).start()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a model's description and tokenizer, and no weights worth reading."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_TARGET / name).read_bytes())
    (folder / "model.safetensors").write_bytes(b"")
    return folder
