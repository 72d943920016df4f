"""What all worker processes have in common: their flags, their keys, and how they serve one orchestrator after another.

Knows the link; knows nothing of what a worker does.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from outrider.protocol import logs
from outrider.protocol.errors import KeyFault, OutriderError
from outrider.protocol.keyring import Keyring
from outrider.protocol.messages import Hello
from outrider.protocol.worker_link import OrchestratorGone, WorkerLink

log = logging.getLogger(__name__)

CPU_KERNELS = "OUTRIDER_CPU_KERNELS"
"""The environment variable that tells a worker what makes its forwards on a CPU, one of `KERNELS`."""
KERNELS = ("auto", "mlx")


class Served(Protocol):
    """A worker's loop."""

    def run(self) -> None:
        """Until it is told to shut down. Raises OrchestratorGone to one that a person started."""
        ...

    def forget(self) -> None:
        """Nobody wants anything of it any more."""
        ...


def add_flags(parser: argparse.ArgumentParser, name: str, far: bool = True) -> None:
    """`far`: it may be on another machine than its orchestrator."""
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--name", default=name)
    parser.add_argument("--parent-fd", type=int, default=None)
    parser.add_argument("--incarnation", type=int, default=None, help="drawn when none is given")
    if far:
        parser.add_argument("--keys", type=Path, default=None, help="the folder of keys")
        parser.add_argument("--server-key", default=None, help="the server's public key (default: the trusted one)")
    else:
        parser.set_defaults(keys=None, server_key=None)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("--log-fd", type=int, default=None, help="the log file of the server that started it")


def run(options: argparse.Namespace, load: Callable[[WorkerLink], tuple[Hello, Served]]) -> int:
    """Enters with its keys, loads and serves. The code to exit with, where an error is said to the orchestrator."""
    try:
        keys = Keyring(options.keys).to_reach(options.endpoint, options.server_key)
    except KeyFault as fault:
        log.error("%s", fault)
        return fault.exit_code
    with WorkerLink(options.endpoint, options.name, options.parent_fd, options.incarnation, keys) as link:
        try:
            hello, worker = load(link)
        except OutriderError as error:
            return link.failed(error)
        return _serve(link, hello, worker)


def _serve(link: WorkerLink, hello: Hello, worker: Served) -> int:
    """Says HELLO and runs until the end; where the orchestrator goes, for the next one. The code to exit with."""
    while True:
        try:
            link.enter(hello)
            worker.run()
            return 0
        except OrchestratorGone as gone:
            log.warning("%s; this %s worker waits for it, or for the next one", gone, hello.role)
            worker.forget()
        except OutriderError as error:
            return link.failed(error)
