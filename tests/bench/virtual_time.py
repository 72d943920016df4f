"""A whole cluster in one thread and in virtual time, for long texts without waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings
from tests.harness.virtual.drafter import VOCAB as VOCAB
from tests.harness.virtual.drafter import Machine as Machine
from tests.harness.virtual.engine import Hardware, VirtualEngine
from tests.harness.virtual.event_loop import EventLoop
from tools.simulation.profile import Profile

PROMPT_TOKENS = 8


def random_texts(count: int, length: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Texts without repetition, so that n-grams find nothing."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(VOCAB) for _ in range(length)) for _ in range(count))


class VirtualCluster(VirtualEngine):
    """Runs requests, one after the other or together; the scheduler keeps what it learned."""

    def __init__(
        self,
        profile: Profile,
        texts: Sequence[tuple[int, ...]],
        *,
        depth: int,
        branches: int,
        fan_out: str = "best-first",
        full_depth: bool = False,
        ngrams: bool = False,
        hop_ms: float = 0.0,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
        others: Sequence[Machine] = (),
    ) -> None:
        """`others`: additional drafters."""
        self._events: list[ToFront] = []
        hardware = Hardware(profile, hop_ms, fan_out, tuple(others))
        settings = round_settings(depth, branches, full_depth, ngrams)
        super().__init__(EventLoop(), hardware, settings, self._events.append, texts, tunings, memory)

    def run(self, text: tuple[int, ...], max_tokens: int, mode: str) -> Timings:
        """Generates `max_tokens` of `text` after its first `PROMPT_TOKENS`. Raises the errors of `run_together`."""
        return self.run_together([text], max_tokens, mode)[0]

    def run_together(self, texts: Sequence[tuple[int, ...]], max_tokens: int, mode: str) -> list[Timings]:
        """Runs a request for each text, all from the same time on.

        Raises:
            InvalidRequest: a text is too short.
            WorkerError: the generated tokens differ from the text, or a request failed.
        """
        needed, shortest = PROMPT_TOKENS + max_tokens + 1, min(map(len, texts))
        if shortest < needed:
            raise InvalidRequest(f"the text has {shortest} tokens; expected {needed} or more")
        begun = len(self._events)
        requests = {f"r{begun}-{number}": text for number, text in enumerate(texts)}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        with self.loop.as_process_clock():
            for request, text in requests.items():
                self.begin(Admit(request, text[:PROMPT_TOKENS], sampling, mode, frozenset()), text)
            while not self.loop.idle:
                self.loop.run_next()
        return [
            self._check_result(request, text, max_tokens, self._events[begun:]) for request, text in requests.items()
        ]

    def _check_result(self, request: str, text: Sequence[int], max_tokens: int, events: Sequence[ToFront]) -> Timings:
        own = [event for event in events if getattr(event, "request", "") == request]
        if not isinstance(own[-1], RequestEnded):
            raise WorkerError(f"the simulated request failed: {own[-1]}")
        generated = tuple(token for event in own if isinstance(event, Committed) for token in event.tokens)
        if generated != text[PROMPT_TOKENS : PROMPT_TOKENS + max_tokens]:
            raise WorkerError("the simulated request generated other tokens than its text")
        return own[-1].timings
