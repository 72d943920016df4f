"""Measures latencies when requests arrive at random times around the capacity, also of mlx_lm.server with the same
weights.

    python -m tools.load                                    # 500 requests at each of three loads: half an hour
    python -m tools.load --requests 240 --shares 1 --plot load.png      # some minutes

locust (`pip install locust`) sends streamed requests, each with a prompt of its own. Each block of requests goes to
every server in turn, at the same times. The capacity is the requests per second of our best mode when many requests
wait; a load is a Poisson process with a share of it. mlx_lm.server runs twice, as its users start it: with the draft,
when it serves one request at a time, and without, when it batches. The exit code is 1 if a request to Outrider failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench.commands.files import parse_modes, parse_numbers
from outrider.bench.comparison.runs import run_interleaved
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import TINY_DRAFT, TINY_TARGET, find_model
from outrider.protocol import values
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_prompts
from tools.web.latency import LatencyRow, draw, make_row, table, time_streams
from tools.web.load_generator import TimedAnswer, poisson_arrivals, require_locust, send_requests
from tools.web.mlx_lm_server import copy_as_float32, run_mlx_lm_server
from tools.web.site import run_site

CAPACITY_REQUESTS, PROMPTS = 32, 60
PEER, PEER_DRAFT = "mlx-lm", "mlx-lm, draft"


@dataclass(frozen=True, slots=True)
class Block:
    """Requests, counted from `begin`, at these times."""

    begin: int
    times: Sequence[float]


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and the fields of its requests besides the prompt. `mark` makes its prompts different from others'."""

    name: str
    url: str
    body: dict[str, Any]
    mark: int

    def run(self, block: Block, _sampling: SamplingParams) -> list[TimedAnswer]:
        return send_requests(self.url, block.times, self.bodies(block.begin, len(block.times)))

    def bodies(self, begin: int, count: int) -> list[dict[str, Any]]:
        """Returns requests with different beginnings, so that no prompt is in a prompt cache."""
        texts = [prompt.text for prompt in mixed_prompts(PROMPTS)]
        return [
            {**self.body, "prompt": f"# {number}.{self.mark}\n{texts[number % PROMPTS]}"}
            for number in range(begin, begin + count)
        ]


@contextmanager
def run_servers(
    modes: Sequence[str], peers: bool, body: dict[str, Any], progress: Callable[[str], None]
) -> Iterator[list[Server]]:
    """Runs Outrider, as a server for each mode, and mlx_lm.server, if `peers`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(progress=progress, memory=False))
        ours = stack.enter_context(run_site(cluster, find_model(str(TINY_TARGET))))
        running = [Server(mode, ours.url, {**body, "speculation": {"mode": mode}}, n) for n, mode in enumerate(modes)]
        if peers:
            progress("starting mlx_lm.server")
            model, draft = (copy_as_float32(path, folder / path.name) for path in (TINY_TARGET, TINY_DRAFT))
            for name, peer_draft in ((PEER, None), (PEER_DRAFT, draft)):
                url = stack.enter_context(run_mlx_lm_server(model, peer_draft, folder / f"{name}.log"))
                running.append(Server(name, url, body, len(running)))
        yield running


def measure_capacity(server: Server, progress: Callable[[str], None]) -> float:
    """Returns the requests per second when many wait.

    Raises:
        WorkerError: a request failed.
    """
    progress(f"capacity: {server.name}")
    answers = send_requests(server.url, [0.0] * CAPACITY_REQUESTS, server.bodies(10**6, CAPACITY_REQUESTS))
    streams = [answer.stream for answer in answers if answer.stream is not None]
    if len(streams) < len(answers):
        raise WorkerError(f"{server.name}: {next(answer.error for answer in answers if answer.error)}")
    return len(streams) / time_streams(streams).seconds


def make_blocks(rate: float, count: int, each: int, share: float) -> list[Block]:
    """Returns `count` requests at `rate` per second, `each` in a block. Their numbers differ between loads."""
    first = round(1000 * share) * 1000
    return [
        Block(first + begin, poisson_arrivals(min(each, count - begin), rate, f"{share} {begin}"))
        for begin in range(0, count, each)
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=500, help="requests per server and load (default: 500)")
    parser.add_argument("--each", type=int, default=60, help="requests per block (default: 60)")
    parser.add_argument("--shares", default="0.7,1,1.2", help="loads as comma-separated shares of the capacity")
    parser.add_argument("--rate", type=float, help="capacity in requests per second (default: measure it)")
    parser.add_argument("--modes", default="ar,auto", help="comma-separated modes (default: ar,auto)")
    parser.add_argument("--no-peers", action="store_true", help="omit mlx_lm.server")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per text (default: 48)")
    parser.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture here")


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        ensure_writable(options.plot.parent, "choose another --plot")
    require_locust()
    count = values.check_int("requests", options.requests, 2, 100_000)
    each = values.check_int("each", options.each, 2, count)
    length = values.check_int("tokens", options.tokens, 2, 600)
    modes, shares = parse_modes(options.modes), parse_numbers("shares", options.shares, float)
    screen, rows = Screen(), list[LatencyRow]()
    body = {"max_tokens": length, "temperature": options.temp}
    with run_servers(modes, not options.no_peers, body, screen.show) as running:
        rate = options.rate or max(measure_capacity(server, screen.show) for server in running if server.name in modes)
        screen.clear()
        print(f"capacity: {rate:.2f} requests per second of {length} tokens each", flush=True)
        for share in shares:
            runners = {server.name: server.run for server in running}
            found = run_interleaved(
                runners, make_blocks(share * rate, count, each, share), SamplingParams(), screen.show
            )
            rows += [make_row(name, share, answers) for name, answers in found.items()]
            screen.clear()
            print(f"\n{share:g} of it, {count} requests per server\n\n{table(rows[-len(running) :])}", flush=True)
    for result in rows:
        for error in result.errors[:3]:
            print(f"{result.name}: {error}")
    if options.plot is not None:
        requests = f"{count} requests per server at random times, {length} tokens each"
        draw(rows, options.plot, f"{requests}; capacity: {rate:.1f} per second")
    return int(any(result.errors for result in rows if result.name in modes))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
