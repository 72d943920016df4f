"""Starts the servers under test: clusters on this machine with HTTP at a free port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.pairing.model_files import TINY_DRAFT, TINY_TARGET, find_model
from outrider.orchestrator.settings import ServeSettings
from tests.harness.conformance.case import Servers
from tests.harness.conformance.http_client import Server
from tests.harness.scripted_model import write_scripted


@contextmanager
def serve_pair(target: Path, draft: Path, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Serves a pair, and yields its URL."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-http-")))
        cluster = stack.enter_context(LocalCluster(model=target, draft_model=draft))
        listener = HttpListener(HttpSettings(port=0, model_names=names))
        stack.callback(listener.close)
        process = HttpProcess(listener, cluster.endpoint, find_model(str(target)), folder, ServeSettings())
        stack.callback(process.close)
        yield listener.url


@contextmanager
def serve_both() -> Iterator[Servers]:
    """Serves the scripted chat model and the tiny pair; both start concurrently."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        chatty = write_scripted(Path(stack.enter_context(TemporaryDirectory(prefix="outrider-chatty-"))) / "chatty")
        pairs = ((chatty, chatty, ("chatty",)), (TINY_TARGET, TINY_DRAFT, ()))
        urls = pool.map(lambda pair: stack.enter_context(serve_pair(*pair)), pairs)
        chat, embedded = (Server(url) for url in urls)
        yield Servers(chat, embedded)
