"""Measures the cost of HTTP compared with the Python client, on one cluster of the tiny pair.

    python -m tools.http_cost                       # 24 single prompts, 6 rounds of 8 concurrent ones: five minutes
    python -m tools.http_cost --prompts 4 --rounds 1 --modes ssd

Each prompt is sent both ways, one right after the other, beginning with a different one each time, over persistent
connections; the texts must be equal. *One stream*: tokens per second from sending to the end, the time to the first
text, and the CPU time per chunk of the server's process. *Several streams*: total tokens per second. With 95 %
intervals over prompts or rounds. Other load on the machine increases the CPU time, too. The exit code is 1 if a limit
is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from outrider.bench.commands.files import parse_modes
from outrider.bench.comparison.runs import Interval, Timed, bootstrap, ratio, run_interleaved, total_rate
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.protocol import values
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tests.harness.requests import TimedRequest, send
from tools.web.site import Site, run_site
from tools.web.streams import CompletionsClient, StreamTimes

# Limits: ratios of tokens per second (one stream, several), milliseconds of delay, and CPU milliseconds per chunk.
MIN_ONE_STREAM_RATIO, MIN_STREAMS_RATIO, MAX_FIRST_TEXT_DELAY_MS, MAX_CPU_MS_PER_CHUNK = 0.92, 0.95, 5.0, 0.5
HTTP, CLIENT = "http", "client"
WARM_UP_PROMPTS = 2

Text = tuple[int, ...]
Ask = Callable[[Text, SamplingParams], StreamTimes]


@dataclass(frozen=True, slots=True)
class Turn:
    """The streams of one prompt, or of a round's prompts, sent one way; `cpu_s`: CPU time of the server's process."""

    streams: tuple[StreamTimes, ...]
    cpu_s: float

    @property
    def timed(self) -> Timed:
        sent, ended = min(stream.sent for stream in self.streams), max(stream.ended for stream in self.streams)
        return Timed(sum(stream.tokens for stream in self.streams), ended - sent)

    @property
    def first_ms(self) -> float:
        return 1000 * (self.streams[0].first - self.streams[0].sent)

    @property
    def chunks(self) -> int:
        return sum(stream.chunks for stream in self.streams)


@dataclass(frozen=True, slots=True)
class Result:
    """A value, its limit, and whether the value is within it."""

    name: str
    value: Interval
    unit: str
    limit: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.value}{self.unit}, limit {self.limit}{'' if self.holds else ': MISSED'}"


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the prompts of a task concurrently, by HTTP or by the client."""

    asks: Sequence[Ask]
    site: Site
    threads: ThreadPoolExecutor

    def __call__(self, prompts: Sequence[Text], sampling: SamplingParams) -> Turn:
        before = self.site.cpu_s
        samplings = [replace(sampling, seed=(sampling.seed or 0) + n) for n in range(len(prompts))]
        streams = tuple(self.threads.map(lambda ask, *request: ask(*request), self.asks, prompts, samplings))
        return Turn(streams, self.site.cpu_s - before)


def ask_client(client: Client, mode: str, prompt: Text, sampling: SamplingParams) -> StreamTimes:
    r = send(client, TimedRequest(prompt, sampling, mode))
    return StreamTimes(r.sent, r.arrivals[0].at, r.ended, len(r.arrivals), len(r.token_ids), r.text)


def ask_http(reader: CompletionsClient, mode: str, prompt: Text, sampling: SamplingParams) -> StreamTimes:
    return reader.ask({
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temp,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "speculation": {"mode": mode},
    })  # fmt: skip


def require_equal_texts(found: dict[str, list[Turn]]) -> None:
    """Checks that both ways gave the same texts.

    Raises:
        WorkerError: a text differs.
    """
    texts = [[stream.text for turn in turns for stream in turn.streams] for turns in found.values()]
    if any(other != texts[0] for other in texts):
        raise WorkerError("texts differ between HTTP and the Python client; expected the same for the same seed")


def rate_ratio(found: dict[str, list[Turn]]) -> Interval:
    """Returns the tokens per second of HTTP over those of the client."""
    return ratio([turn.timed for turn in found[HTTP]], [turn.timed for turn in found[CLIENT]])


def first_text_delay_ms(found: dict[str, list[Turn]]) -> Interval:
    """Returns the median of how much later the first text arrives by HTTP."""
    waits = [http.first_ms - client.first_ms for http, client in zip(found[HTTP], found[CLIENT], strict=True)]
    return bootstrap(waits, lambda drawn: sorted(drawn)[len(drawn) // 2])


def cpu_ms_per_chunk(found: dict[str, list[Turn]]) -> Interval:
    """Returns the server's CPU milliseconds per chunk, from whole requests divided by their chunks."""
    return bootstrap(
        found[HTTP], lambda drawn: 1000 * sum(turn.cpu_s for turn in drawn) / sum(turn.chunks for turn in drawn)
    )


def check_limits(mode: str, one: dict[str, list[Turn]], several: dict[str, list[Turn]], streams: int) -> list[Result]:
    """Returns all values for `one` stream and for `several`."""
    rate, total, later, cpu, cpu_several = (
        rate_ratio(one),
        rate_ratio(several),
        first_text_delay_ms(one),
        cpu_ms_per_chunk(one),
        cpu_ms_per_chunk(several),
    )
    first, all_ = f"{mode}, one stream", f"{mode}, {streams} streams"

    def least(name: str, value: Interval, limit: float) -> Result:
        return Result(name, value, "", f">= {limit}", value.value >= limit)

    def most_ms(name: str, value: Interval, limit: float) -> Result:
        return Result(name, value, " ms", f"<= {limit}", value.value <= limit)

    return [
        least(f"{first}: tokens/s, HTTP / client", rate, MIN_ONE_STREAM_RATIO),
        most_ms(f"{first}: first text later by", later, MAX_FIRST_TEXT_DELAY_MS),
        most_ms(f"{first}: CPU per chunk", cpu, MAX_CPU_MS_PER_CHUNK),
        least(f"{all_}: total tokens/s, HTTP / client", total, MIN_STREAMS_RATIO),
        most_ms(f"{all_}: CPU per chunk", cpu_several, MAX_CPU_MS_PER_CHUNK),
    ]


def format_rates(name: str, found: dict[str, list[Turn]]) -> str:
    """Returns a line with the rates of both ways."""
    rates = ", ".join(f"{sender} {total_rate([turn.timed for turn in turns]):.1f}" for sender, turns in found.items())
    tokens = sum(turn.timed.tokens for turn in found[HTTP]) / sum(turn.chunks for turn in found[HTTP])
    return f"{name}: tokens/s {rates}; {tokens:.2f} tokens per chunk"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="ar,ssd", help="comma-separated modes (default: ar,ssd)")
    parser.add_argument("--prompts", type=int, default=24, help="single prompts (default: 24)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of concurrent prompts (default: 6)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent prompts per round (default: 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text (default: 128)")
    parser.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0)")


def run(options: argparse.Namespace) -> int:
    modes = parse_modes(options.modes)
    streams = values.check_int("streams", options.streams, 2, 64)
    rounds = values.check_int("rounds", options.rounds, 1, 1000)
    length = values.check_int("tokens", options.tokens, 2, 600)
    prompts = mixed_tokens(options.prompts)
    singles = [[prompt] for prompt in prompts]
    together = [[prompts[(number + n) % len(prompts)] for n in range(streams)] for number in range(rounds)]
    screen, missed = Screen(), False
    sampling = SamplingParams(max_tokens=length, temp=options.temp, ignore_eos=True)
    with ExitStack() as stack:
        start = LocalCluster(progress=screen.show, max_active=streams, prompt_cache=False, memory=False)
        cluster = stack.enter_context(start)
        server = stack.enter_context(run_site(cluster, find_model(str(TINY_TARGET))))
        readers, client = [CompletionsClient(server.url) for _ in range(streams)], cluster.client()
        threads = stack.enter_context(ThreadPoolExecutor(streams))
        for mode in modes:
            senders = {
                HTTP: Sender([partial(ask_http, reader, mode) for reader in readers], server, threads),
                CLIENT: Sender([partial(ask_client, client, mode)] * streams, server, threads),
            }
            run_interleaved(senders, singles[:WARM_UP_PROMPTS], sampling, screen.show)
            one = run_interleaved(senders, singles, sampling, screen.show)
            several = run_interleaved(senders, together, sampling, screen.show, seeds=streams)
            require_equal_texts(one)
            require_equal_texts(several)
            screen.clear()
            print(
                format_rates(f"{mode}, one stream", one), format_rates(f"{mode}, {streams} streams", several), sep="\n"
            )
            for result in check_limits(mode, one, several, streams):
                print(result, flush=True)
                missed |= not result.holds
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
