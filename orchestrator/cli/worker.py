"""Runs one worker in the foreground, such as a further drafter for a cluster that is running (`serve` prints where)."""

from __future__ import annotations

import argparse
import os
import signal
import socket

from outrider.orchestrator.cli import flags
from outrider.orchestrator.machine import blas
from outrider.orchestrator.machine.spawn import MODULES, child_environment, worker_command
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.endpoints import parse, require_server
from outrider.protocol.errors import InvalidRequest


def add_flags(parser: argparse.ArgumentParser) -> None:
    note = "a draft joins a running cluster; a target is turned away, since a cluster spawns its own"
    parser.add_argument("role", choices=list(MODULES), help=note)
    parser.add_argument("--connect", metavar="ENDPOINT", required=True, help="the cluster's endpoint for workers")
    parser.add_argument("--name", help="default: the role, this host and the process id")
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Becomes the worker: this process is replaced, so signals and the exit code are the worker's own."""
    settings = ServeSettings(**flags.settings_of(options))
    if options.role == "draft" and settings.colocate:
        raise InvalidRequest("colocate drafts in the target's process; expected no colocate for a draft worker")
    if options.role == "draft" and not settings.has_draft_worker:
        raise InvalidRequest(f"draft_backend {settings.draft_backend} has no worker; expected mlx, coreml or replay")
    endpoint = str(parse(options.connect))
    require_server(endpoint)
    pair = choose_pair(settings)
    if options.role == "draft" and not pair.settings.has_draft_worker:
        raise InvalidRequest("no draft model is named; expected --model and --draft-model, or neither")
    name = options.name or f"{options.role}-{socket.gethostname()[:32]}-{os.getpid()}"
    command = worker_command(options.role, name, endpoint, pair.settings)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # kept until the worker can end in order (WorkerLink)
    os.execve(command[0], command, blas.environment(child_environment(), settings.threads))
