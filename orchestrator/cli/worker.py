"""Runs one worker in the foreground. A draft or prefill worker joins a running server. A target worker joins a server
that was started with --await-target; if mlx.launch starts it, it is one of several ranks (--shard).

A drafter on another machine needs only the draft model, and a key that the server allows (docs/security.md).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import add_server_key_flag
from outrider.orchestrator.machine import lan, system
from outrider.orchestrator.machine.spawn import MODULES, child_environment, worker_command
from outrider.orchestrator.machine.system import require_mlx
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec, vocabulary_digest
from outrider.orchestrator.settings import LOG_LEVELS, ServeSettings
from outrider.protocol.endpoints import find_client_keys, is_local, parse_endpoint, probe, require_server
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.keys import Keyring, parse_key

COMMON = (
    "--connect", "--discover", "--server-key", "--name", "--model", "--draft-model", "--draft-backend", "--keys",
    "--threads", "--log-level",
)  # fmt: skip
SERVER_SETTINGS = (
    *flags.MULTI_REQUEST_SETTINGS, "drafters", "branch_depth", "ngrams", "trees", "pin_cores", "prefill_workers",
    "prefill_from", "worker_timeout", "kv_memory", "prompt_cache", "memory", "trace", "log_level",
)  # fmt: skip
"""Settings that have no effect on a worker or another default, or that the server decides."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=list(MODULES), help="the worker's role")
    where = parser.add_mutually_exclusive_group(required=True)
    joined = "the endpoint that the server prints as `workers:`; this or --discover is required"
    where.add_argument("--connect", metavar="ENDPOINT", help=joined)
    find = "find a server with a trusted key (`outrider keys trust`) on the local network"
    where.add_argument("--discover", action="store_true", help=find)
    add_server_key_flag(parser.add_argument)
    name = "the worker's name on the server (default: the role, this host and the process id)"
    parser.add_argument("--name", metavar="NAME", help=name)
    shard = "run as one of several ranks of the target, all started by mlx.launch"
    parser.add_argument("--shard", action="store_true", help=shard)
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    flags.add_cluster_flags(parser, SERVER_SETTINGS)
    level = "the lowest level that is logged (default: info, so that the worker says that it has joined)"
    parser.add_argument("--log-level", default="info", metavar="|".join(LOG_LEVELS), help=level)


def run(options: argparse.Namespace) -> int:
    """Replaces this process by the worker, so that signals and the exit code are the worker's own."""
    if options.role == "prefill":
        options.draft_backend, options.draft_model = "none", None  # it needs the target's model only
    is_head = options.head_in == "draft-worker"  # a head needs the target's files, too
    if options.role == "draft" and options.draft_model is not None and not is_head:
        options.model = options.draft_model  # a drafter needs only its own model, and its machine may have no other
    require_mlx()
    settings = ServeSettings(**flags.settings_of(options))
    if options.role == "draft" and not settings.has_draft_worker:
        expected = "expected mlx or coreml without --colocate, or a head with --head-in draft-worker"
        raise InvalidRequest(f"{settings.no_worker_reason} has no draft worker; {expected}")
    if options.shard and (options.role != "target" or settings.shards > 1):
        raise InvalidRequest("--shard is for one rank that mlx.launch starts; expected role target, and no --shards")
    if options.discover:
        trusted = Keyring(options.keys).servers().values()
        found = lan.find_server([parse_key(options.server_key)] if options.server_key is not None else trusted)
        options.connect, options.server_key = found.endpoint, found.key
    endpoint = str(parse_endpoint(options.connect))
    if os.environ.get("MLX_RANK", "0") == "0":  # only rank 0 connects to the server
        require_server(endpoint)
        probe(endpoint, find_client_keys(endpoint, options.server_key, settings.keys))
    pair = choose_pair(settings)
    if options.role == "draft" and pair.settings.drafts_with_head and not is_head:
        raise InvalidRequest(
            f"{options.draft_model} is a draft head; start this worker and the server with --head-in draft-worker"
        )
    if options.role == "draft" and not pair.settings.has_draft_worker:
        raise InvalidRequest("--draft-model is missing; give both --model and --draft-model, or neither")
    name = options.name or f"{options.role}-{socket.gethostname()[:32]}-{os.getpid()}"
    command = worker_command(options.role, name, endpoint, pair.settings, options.parent_fd)
    command += ["--shard"] if options.shard else []
    if options.role != "target":
        command += _joining_options(options, pair)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # kept until the worker can end cleanly (WorkerLink)
    far = options.role == "draft" and not is_local(parse_endpoint(endpoint))  # its machine's cores are its own
    threads = system.threads_of("target" if far else options.role, settings)
    os.execve(command[0], command, system.blas_environment(child_environment(), threads, settings.cpu_kernels))


def _joining_options(options: argparse.Namespace, pair: ChosenPair) -> list[str]:
    """Returns the options of a worker that this server did not start: its keys, and its vocabulary's fingerprint."""
    given = (("--keys", options.keys), ("--server-key", options.server_key))
    line = [f"{flag}={value}" for flag, value in given if value is not None]
    if options.role == "draft" and pair.draft is not None:
        model = pair.target if pair.settings.drafts_with_head else pair.draft
        line += ["--vocabulary", vocabulary_digest(load_codec(model))]
    return line
