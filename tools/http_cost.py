"""What HTTP costs beside the Python client, before one cluster of the embedded pair.

    python -m tools.http_cost                       # 24 prompts alone, 6 rounds of 8 at once: five minutes
    python -m tools.http_cost --prompts 4 --rounds 1 --modes ssd

Every prompt is asked for both ways, one right after the other and another one first each time, over connections that
are kept; texts must be the same. *Alone*: tokens per second from sending to the end, the time to the first text, and
the CPU of the server's process a chunk. *At once*: tokens per second of all. With 95 % intervals over prompts and
rounds. CPU, too, grows with what else the machine does. The exit code is 1 where a value misses what is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from outrider.bench.commands.files import modes_of
from outrider.bench.comparison.requests import TimedRequest, send
from outrider.bench.comparison.runs import Interval, Timed, bootstrap, ratio, run_interleaved, total_rate
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import EMBEDDED_TARGET, find_model
from outrider.protocol import values
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tools.web.reading import EventReader, Heard
from tools.web.site import Site, site

ALONE_ASKED, AT_ONCE_ASKED, FIRST_MS_ASKED, CPU_MS_ASKED = 0.92, 0.95, 5.0, 0.5
HTTP, CLIENT = "http", "client"
WARM_UP = 2

Text = tuple[int, ...]
Ask = Callable[[Text, SamplingParams], Heard]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one way gave for a prompt, or for those of a round; `cpu_s` of the server's process."""

    heard: tuple[Heard, ...]
    cpu_s: float

    @property
    def timed(self) -> Timed:
        sent, ended = min(one.sent for one in self.heard), max(one.ended for one in self.heard)
        return Timed(sum(one.tokens for one in self.heard), ended - sent)

    @property
    def first_ms(self) -> float:
        return 1000 * (self.heard[0].first - self.heard[0].sent)

    @property
    def chunks(self) -> int:
        return sum(one.chunks for one in self.heard)


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and whether it is what was asked for."""

    name: str
    value: Interval
    unit: str
    asked: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.value}{self.unit}, asked {self.asked}{'' if self.holds else ': MISSED'}"


@dataclass(frozen=True, slots=True)
class Many:
    """One way to ask, from as many places at once as there are prompts in a task."""

    name: str
    asks: Sequence[Ask]
    site: Site
    threads: ThreadPoolExecutor

    def run(self, prompts: Sequence[Text], sampling: SamplingParams) -> Turn:
        before = self.site.cpu_s
        seeds = [replace(sampling, seed=(sampling.seed or 0) + place) for place in range(len(prompts))]
        heard = tuple(self.threads.map(lambda ask, *asked: ask(*asked), self.asks, prompts, seeds))
        return Turn(heard, self.site.cpu_s - before)


def by_client(client: Client, mode: str, prompt: Text, sampling: SamplingParams) -> Heard:
    reply = send(client, TimedRequest(prompt, sampling, mode))
    return Heard(reply.sent, reply.arrivals[0].at, reply.ended, len(reply.arrivals), len(reply.token_ids), reply.text)


def by_http(reader: EventReader, mode: str, prompt: Text, sampling: SamplingParams) -> Heard:
    return reader.ask({
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temp,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "speculation": {"mode": mode},
    })  # fmt: skip


def require_same(found: dict[str, list[Turn]]) -> None:
    """
    Raises:
        WorkerError: a text is not the same both ways.
    """
    texts = [[one.text for turn in made for one in turn.heard] for made in found.values()]
    if any(other != texts[0] for other in texts):
        raise WorkerError("texts differ between HTTP and the Python client; expected the same for the same seed")


def compared(found: dict[str, list[Turn]]) -> Interval:
    """Tokens per second of HTTP over those of the client."""
    return ratio([turn.timed for turn in found[HTTP]], [turn.timed for turn in found[CLIENT]])


def later_ms(found: dict[str, list[Turn]]) -> Interval:
    """How much later the first text comes by HTTP, in the middle."""
    waits = [one.first_ms - other.first_ms for one, other in zip(found[HTTP], found[CLIENT], strict=True)]
    return bootstrap(waits, lambda chosen: sorted(chosen)[len(chosen) // 2])


def cpu_ms(found: dict[str, list[Turn]]) -> Interval:
    """The server's CPU for a chunk, all that a request costs shared by its chunks."""
    return bootstrap(
        found[HTTP], lambda chosen: 1000 * sum(turn.cpu_s for turn in chosen) / sum(turn.chunks for turn in chosen)
    )


def judged(mode: str, alone: dict[str, list[Turn]], together: dict[str, list[Turn]], places: int) -> list[Found]:
    one, all_, first, cpu = compared(alone), compared(together), later_ms(alone), cpu_ms(alone)
    many = cpu_ms(together)
    name = f"{mode}, one stream"
    return [
        Found(f"{name}: tokens/s, HTTP / client", one, "", f">= {ALONE_ASKED}", one.value >= ALONE_ASKED),
        Found(f"{name}: first text later by", first, " ms", f"<= {FIRST_MS_ASKED}", first.value <= FIRST_MS_ASKED),
        Found(f"{name}: CPU a chunk", cpu, " ms", f"<= {CPU_MS_ASKED}", cpu.value <= CPU_MS_ASKED),
        Found(
            f"{mode}, {places} streams: tokens/s of all, HTTP / client",
            all_,
            "",
            f">= {AT_ONCE_ASKED}",
            all_.value >= AT_ONCE_ASKED,
        ),
        Found(f"{mode}, {places} streams: CPU a chunk", many, " ms", f"<= {CPU_MS_ASKED}", many.value <= CPU_MS_ASKED),
    ]


def told(name: str, found: dict[str, list[Turn]]) -> str:
    """Both ways in absolute numbers."""
    rates = ", ".join(f"{way} {total_rate([turn.timed for turn in made]):.1f}" for way, made in found.items())
    made = found[HTTP]
    tokens = sum(turn.timed.tokens for turn in made) / sum(turn.chunks for turn in made)
    return f"{name}: tokens/s {rates}; {tokens:.2f} tokens a chunk"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="ar,ssd", help="with commas between, default ar,ssd")
    parser.add_argument("--prompts", type=int, default=24, help="asked one at a time; default 24")
    parser.add_argument("--rounds", type=int, default=6, help="of several at once; default 6")
    parser.add_argument("--places", type=int, default=8, help="how many at once; default 8")
    parser.add_argument("--tokens", type=int, default=128, help="of each text, default 128")
    parser.add_argument("--temp", type=float, default=0.0, help="default 0")


def run(options: argparse.Namespace) -> int:
    modes = modes_of(options.modes)
    places = values.whole("places", options.places, 2, 64)
    rounds = values.whole("rounds", options.rounds, 1, 1000)
    length = values.whole("tokens", options.tokens, 2, 600)
    prompts = mixed_tokens(options.prompts)
    alone = [[prompt] for prompt in prompts]
    together = [[prompts[(number + n) % len(prompts)] for n in range(places)] for number in range(rounds)]
    screen, missed = Screen(), False
    sampling = SamplingParams(max_tokens=length, temp=options.temp, ignore_eos=True)
    with ExitStack() as stack:
        start = LocalCluster(progress=screen.show, max_active=places, prompt_cache=False, memory=False)
        cluster = stack.enter_context(start)
        where = stack.enter_context(site(cluster, find_model(str(EMBEDDED_TARGET))))
        readers, client = [EventReader(where.url) for _ in range(places)], cluster.client()
        threads = stack.enter_context(ThreadPoolExecutor(places))
        for mode in modes:
            ways = [
                Many(HTTP, [partial(by_http, reader, mode) for reader in readers], where, threads),
                Many(CLIENT, [partial(by_client, client, mode)] * places, where, threads),
            ]
            run_interleaved(ways, alone[:WARM_UP], sampling, screen.show)
            one = run_interleaved(ways, alone, sampling, screen.show)
            all_ = run_interleaved(ways, together, sampling, screen.show, seeds=places)
            require_same(one)
            require_same(all_)
            screen.clear()
            print(told(f"{mode}, one stream", one), told(f"{mode}, {places} streams", all_), sep="\n")
            for found in judged(mode, one, all_, places):
                print(found, flush=True)
                missed |= not found.holds
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
