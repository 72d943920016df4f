"""Requests at random times around what the server can bear, and mlx_lm.server beside it on the same weights.

    python -m tools.load                                    # 500 requests at each of three loads: half an hour
    python -m tools.load --requests 240 --shares 1 --plot load.png      # some minutes

The requests are sent by locust (`pip install locust`), streamed, one a prompt of its own; each block of them goes to
every way in turn, at the same times. The capacity is what the better of our modes makes when many wait; a load is a
share of it, as requests a second, Poisson. mlx_lm.server runs twice, as its users start it: with the draft, where it
takes a request at a time, and without, where it batches. The exit code is 1 when a request of ours ended with an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench.commands.files import modes_of, numbers
from outrider.bench.comparison.runs import run_interleaved
from outrider.bench.prompts import mixed
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET, find_model
from outrider.protocol import values
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tools.web.generator import TimedAnswer, generate, poisson, require_locust
from tools.web.latency import LatencyRow, draw, row, table, timed
from tools.web.peer import as_float32, mlx_lm_server
from tools.web.site import site

CAPACITY_REQUESTS, PROMPTS = 32, 60
PEER, PEER_DRAFT = "mlx-lm", "mlx-lm, draft"


@dataclass(frozen=True, slots=True)
class Block:
    """Requests, counted from `begin`, at these times."""

    begin: int
    times: Sequence[float]


@dataclass(frozen=True, slots=True)
class Way:
    """Where requests go, and what each says beside its prompt. `mark` keeps its prompts apart from those of others."""

    name: str
    url: str
    body: dict[str, Any]
    mark: int

    def run(self, block: Block, _sampling: SamplingParams) -> list[TimedAnswer]:
        return generate(self.url, block.times, self.bodies(block.begin, len(block.times)))

    def bodies(self, begin: int, count: int) -> list[dict[str, Any]]:
        """No two begin alike, so that none is known from one before."""
        texts = [prompt.text for prompt in mixed(PROMPTS)]
        return [
            {**self.body, "prompt": f"# {number}.{self.mark}\n{texts[number % PROMPTS]}"}
            for number in range(begin, begin + count)
        ]


@contextmanager
def ways(modes: Sequence[str], peers: bool, body: dict[str, Any], tell: Callable[[str], None]) -> Iterator[list[Way]]:
    """Every way, its server running."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(progress=tell, memory=False))
        ours = stack.enter_context(site(cluster, find_model(str(EMBEDDED_TARGET))))
        found = [Way(mode, ours.url, {**body, "speculation": {"mode": mode}}, n) for n, mode in enumerate(modes)]
        if peers:
            tell("starting mlx_lm.server")
            model, draft = (as_float32(path, folder / path.name) for path in (EMBEDDED_TARGET, EMBEDDED_DRAFT))
            for name, its_draft in ((PEER, None), (PEER_DRAFT, draft)):
                url = stack.enter_context(mlx_lm_server(model, its_draft, folder / f"{name}.log"))
                found.append(Way(name, url, body, len(found)))
        yield found


def capacity(way: Way, tell: Callable[[str], None]) -> float:
    """Requests a second when many wait.

    Raises:
        WorkerError: one failed.
    """
    tell(f"capacity: {way.name}")
    answers = generate(way.url, [0.0] * CAPACITY_REQUESTS, way.bodies(10**6, CAPACITY_REQUESTS))
    heard = [answer.heard for answer in answers if answer.heard is not None]
    if len(heard) < len(answers):
        raise WorkerError(f"{way.name}: {next(answer.error for answer in answers if answer.error)}")
    return len(heard) / timed(heard).seconds


def blocks(rate: float, count: int, each: int, share: float) -> list[Block]:
    """So many requests, `each` in a block, at `rate` a second; at another load all are others."""
    first = round(1000 * share) * 1000
    return [
        Block(first + begin, poisson(min(each, count - begin), rate, f"{share} {begin}"))
        for begin in range(0, count, each)
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=500, help="by each way at each load, default 500")
    parser.add_argument("--each", type=int, default=60, help="requests in a block, default 60")
    parser.add_argument("--shares", default="0.7,1,1.2", help="loads as shares of the capacity, with commas between")
    parser.add_argument("--rate", type=float, help="the capacity, requests a second; default: it is measured")
    parser.add_argument("--modes", default="ar,auto", help="with commas between, default ar,auto")
    parser.add_argument("--no-peers", action="store_true", help="leave mlx_lm.server out")
    parser.add_argument("--tokens", type=int, default=48, help="of each text, default 48")
    parser.add_argument("--temp", type=float, default=0.0, help="default 0")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the picture goes")


def run(options: argparse.Namespace) -> int:
    require_locust()
    count = values.whole("requests", options.requests, 2, 100_000)
    each = values.whole("each", options.each, 2, count)
    length = values.whole("tokens", options.tokens, 2, 600)
    modes, shares = modes_of(options.modes), numbers("shares", options.shares, float)
    screen, rows = Screen(), list[LatencyRow]()
    body = {"max_tokens": length, "temperature": options.temp}
    with ways(modes, not options.no_peers, body, screen.show) as field:
        ours = [way for way in field if way.name in modes]
        rate = options.rate or max(capacity(way, screen.show) for way in ours)
        screen.clear()
        print(f"capacity: {rate:.2f} requests a second, of {length} tokens each", flush=True)
        for share in shares:
            found = run_interleaved(field, blocks(share * rate, count, each, share), SamplingParams(), screen.show)
            rows += [row(name, share, answers) for name, answers in found.items()]
            screen.clear()
            print(f"\n{share:g} of it, {count} requests by each way\n\n{table(rows[-len(field) :])}", flush=True)
    for one in rows:
        for error in one.errors[:3]:
            print(f"{one.name}: {error}")
    if options.plot is not None:
        title = (
            f"Requests at random times, {length} tokens each, {count} by each way; the capacity is {rate:.1f} a second"
        )
        draw(rows, options.plot, title)
    return int(any(one.errors for one in rows if one.name in modes))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
