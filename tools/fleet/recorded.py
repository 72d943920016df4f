"""Generates an engine's tokens as a flow, at the rate that was recorded from real rounds.

Prompts are read in order of arrival, in pieces that share forwards with decoding requests by the target worker's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS
from outrider.target_worker.model_runner import MIN_CHUNK_TOKENS
from tests.harness.virtual.event_loop import EventLoop
from tests.harness.virtual.prompt_cache import VirtualPromptCache
from tools.fleet.job import Job
from tools.fleet.rounds import OnTokens
from tools.fleet.service_rates import ServiceRate, ServiceRates

EPSILON = 1e-6


@dataclass(slots=True)
class Running:
    """A running request: the tokens `unread` of its prompt, and those `left` of its answer."""

    job: Job
    unread: float
    left: float


class RecordedFlow:
    """A flow of tokens. `services` returns the recorded rates for the number of drafters left."""

    def __init__(
        self,
        loop: EventLoop,
        services: Callable[[int], ServiceRates],
        drafters: int,
        prompt_rate: float,
        remembers: int,
        on_tokens: OnTokens,
        on_complete: Callable[[Job], None],
    ) -> None:
        self._loop, self._services, self._all = loop, services, drafters
        self._service = services(drafters)
        self._prompt_ms = 1000 / prompt_rate if prompt_rate else 0.0
        self._prompt_cache = VirtualPromptCache(remembers)
        self._on_tokens, self._on_complete = on_tokens, on_complete
        self._running: list[Running] = []
        self._since, self._busy, self._timer_number = loop.now, 0.0, 0

    @property
    def busy(self) -> float:
        self._advance()
        return self._busy

    def begin(self, job: Job) -> None:
        self._advance()
        text = job.text[: job.prompt + round(job.received)]
        unread = len(text) - self._prompt_cache.lookup(text) if self._prompt_ms else 0
        self._running.append(Running(job, unread, job.answer - job.received))
        self._set_timer()

    def end(self) -> None:
        self._advance()
        self._running.clear()
        self._timer_number += 1

    def lose_drafters(self, count: int, noticed: float) -> None:
        """Continues without these drafters at once. The rounds' waits until the loss is noticed are not simulated."""
        self._set_drafters(self._all - count)

    def regain_drafters(self) -> None:
        self._set_drafters(self._all)

    def _set_drafters(self, drafters: int) -> None:
        self._advance()
        self._service = self._services(drafters)
        self._set_timer()

    def _speeds(self) -> tuple[float, float]:
        """Returns the tokens per second of the prompt being read, and of each decoding request."""
        readers = sum(running.unread > 0 for running in self._running)
        decoding = len(self._running) - readers
        pace = self._service[max(decoding, 1) - 1]
        if not readers:
            return 0.0, pace.rate
        piece = self._piece_tokens(pace, readers, decoding)
        decode_ms = pace.forward_ms if decoding else 0.0
        forward_ms = decode_ms + piece * self._prompt_ms
        return 1000 * piece / forward_ms, pace.rate * decode_ms / forward_ms

    def _piece_tokens(self, pace: ServiceRate, readers: int, decoding: int) -> float:
        if readers > decoding:
            return PREFILL_CHUNK_TOKENS
        return min(
            max(pace.share * readers * pace.forward_ms / self._prompt_ms, MIN_CHUNK_TOKENS), PREFILL_CHUNK_TOKENS
        )

    def _advance(self) -> None:
        """Credits the tokens that flowed since the last call."""
        seconds, self._since = self._loop.now - self._since, self._loop.now
        if not self._running or seconds <= 0:
            return
        self._busy += seconds
        reading, rate = self._speeds()
        reader = next((one for one in self._running if one.unread > 0), None)
        for one in [one for one in self._running if one.unread <= 0]:
            brought = min(rate * seconds, one.left)
            one.left -= brought
            if brought:
                self._on_tokens(one.job, brought, flows=seconds)
        if reader is not None:
            reader.unread = max(reader.unread - reading * seconds, 0.0)
            reader.unread = 0.0 if reader.unread < EPSILON else reader.unread

    def _set_timer(self) -> None:
        """Sets a timer for the next prompt that is read completely or text that ends."""
        self._timer_number += 1
        if not self._running:
            return
        reading, rate = self._speeds()
        reader = next((one for one in self._running if one.unread > 0), None)
        waits = [one.left / rate for one in self._running if one.unread <= 0 and rate > 0]
        waits += [reader.unread / reading] if reader is not None else []
        turn = self._timer_number
        self._loop.call_later(max(min(waits), EPSILON), lambda: self._on_timer(turn))

    def _on_timer(self, turn: int) -> None:
        if turn != self._timer_number:
            return
        reader = next((one for one in self._running if one.unread > 0), None)
        self._advance()
        if reader is not None and reader.unread <= 0:  # the same forward gives its first token
            reader.left -= 1
            self._on_tokens(reader.job, 1.0)
        for one in [one for one in self._running if one.unread <= 0 and one.left <= EPSILON]:
            self._running.remove(one)
            one.job.received = one.job.answer
            self._prompt_cache.add(one.job.text[: one.job.prompt + one.job.answer])
            self._on_complete(one.job)
        self._set_timer()
