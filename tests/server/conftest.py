"""The servers of these tests, which are started once and closed after the last test."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from outrider import LocalCluster
from tests.harness.scripted_model import write_scripted
from tests.server.collector import Collector, collecting
from tests.server.plain_model import write_plain
from tests.server.running_server import KEY, STREAMS, RunningServer, serve_command, serving
from tests.tiny import Pair

if TYPE_CHECKING:  # importing each takes a second, so only the fixtures that use them do
    import anthropic
    import openai


@pytest.fixture(scope="package", autouse=True)
def without_certificates() -> Iterator[None]:
    """These servers have no TLS, but httpx would read all certificates before each request, which takes 50 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "stream"):
            patch.setattr(httpx, name, partial(getattr(httpx, name), verify=False))
        yield


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Receives the spans of the chat model's server, soon after they end."""
    with collecting() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model's folder."""
    return write_scripted(tmp_path_factory.mktemp("scripted") / "chatty")


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The folders of a pair without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    return Pair(write_plain(folder / "plain"), write_plain(folder / "draft", noise=0.04))


@pytest.fixture(scope="package")
def running_servers(
    tmp_path_factory: pytest.TempPathFactory, scripted: Path, plain: Pair, collector: Collector
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """The servers of the chat model and of the plain pair; they start in parallel.

    The chat model is mostly tested with output formats, so it drafts only for requests that name a mode.
    """
    folder = tmp_path_factory.mktemp("http")

    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def attached() -> RunningServer:
            cluster = stack.enter_context(LocalCluster(model=scripted, draft_model=scripted, mode="ar"))
            return stack.enter_context(serving(cluster.endpoint, scripted, folder, max_streams_per_key=STREAMS))

        chat = pool.submit(attached)
        pair = pool.submit(lambda: stack.enter_context(serve_command(plain, folder / "log")))
        one, two = chat.result(), pair.result()
        yield one, two


@pytest.fixture(scope="package")
def chat(running_servers: tuple[RunningServer, RunningServer]) -> RunningServer:
    return running_servers[0]


@pytest.fixture(scope="package")
def pair(running_servers: tuple[RunningServer, RunningServer]) -> RunningServer:
    return running_servers[1]


@pytest.fixture(scope="module")
def ai(chat: RunningServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def other_ai(pair: RunningServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(chat: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=chat.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def guarded(pair: RunningServer, plain: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of the same cluster that requires the key."""
    folder = tmp_path_factory.mktemp("guarded")
    with serving(pair.client.endpoint, plain.target, folder, api_keys=(KEY,)) as server:
        yield server.url
