"""A cluster in one thread for several requests, whose target and drafter can die and be restarted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.orchestrator.events import Admit, Committed, RequestEnded
from outrider.protocol.messages import Close, Failed, Message, Open, Verify
from outrider.protocol.sampling import SamplingParams
from tests.orchestrator.cluster_in_process import Cluster, OracleTarget
from tests.system.links import FakeLink
from tools.simulation.replay import ReplayDrafter, Script

VOCAB = 200
PROMPT = tuple(range(10, 20))


def random_text(seed: int, length: int = 400) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (*PROMPT, seed, *(rng.randrange(1, VOCAB) for _ in range(length)))


class TargetDied(Exception):
    """The target process has ended."""


class Targets:
    """A target for several requests. It dies when the text of a request in `poison` reaches the given length."""

    def __init__(self, texts: dict[str, tuple[int, ...]], poison: dict[str, int]) -> None:
        self.context = 1 << 20
        self.poison = poison
        self.oracles = {name: OracleTarget(text) for name, text in texts.items()}
        self._latest = OracleTarget(())

    @property
    def autonomous(self) -> Verify | None:
        return self._latest.autonomous

    @autonomous.setter
    def autonomous(self, message: Verify | None) -> None:
        self._latest.autonomous = message

    def answer(self, message: Message) -> list[Message]:
        name = message.request  # type: ignore[union-attr]
        at = (
            len(message.tokens) if isinstance(message, Open) else message.base_len if isinstance(message, Verify) else 0
        )
        self._check_poison(name, at)
        self._latest = self.oracles[name]
        return self._latest.answer(message)

    def step(self) -> Message | None:
        for name, oracle in self.oracles.items():
            if oracle.plain is not None:
                self._check_poison(name, oracle.plain.base_len)
                return oracle.step()
        return None

    def _check_poison(self, name: str, length: int) -> None:
        if length >= self.poison.get(name, length + 1):
            raise TargetDied


class FailingCluster(Cluster):
    """Generates these texts for requests r0, r1, ... A dead target is replaced only by `restart_target`."""

    def __init__(self, texts: Sequence[tuple[int, ...]], poison: dict[str, int] | None = None, **options: Any) -> None:
        self.texts = {f"r{number}": text for number, text in enumerate(texts)}
        self.poison = poison or {}
        self.script = Script(tuple(texts), (0.7,), (0.6, 0.2), VOCAB)
        super().__init__(texts[0], self.script, **options)
        self.target = Targets(self.texts, self.poison)  # type: ignore[assignment]
        self.alive, self.deaths = True, 0
        self.opened: list[list[str]] = [[]]

    def begin(self, mode: str, max_tokens: int = 60) -> None:
        for name, text in self.texts.items():
            sampling = SamplingParams(max_tokens=max_tokens)
            self.rounds.begin(Admit(name, text[:11], sampling, mode, frozenset()), self._now)

    def send_target(self, message: Message) -> None:
        assert self.alive or isinstance(message, Close), f"{message} was sent while there is no target"
        if isinstance(message, Open):
            self.opened[-1].append(message.request)
        if self.alive:
            super().send_target(message)

    def run_turns(self, count: int) -> None:
        for _ in range(count):
            if self.rounds.active:
                self._turn()

    def run_to_end(self, restart: bool = True) -> None:
        """Runs until no request is left. A target that dies is restarted after some turns."""
        for _ in range(20_000):
            if not self.rounds.active:
                return
            self._turn()
            if not self.alive and restart:
                self.run_turns(3)
                self.restart_target()
        raise TimeoutError(f"requests hang: {self.events[-3:]}")

    def _turn(self) -> None:
        try:
            super()._turn()
        except TargetDied:
            self.kill_target()

    def kill_target(self, for_good: bool = False) -> None:
        self.alive = False
        self.deaths += 1
        self._to_target.clear()
        self.target = Targets({}, {})  # type: ignore[assignment]
        self.rounds.on_target_lost("target worker target-0 ended with code -9", for_good)

    def restart_target(self) -> None:
        self.target = Targets(self.texts, self.poison)  # type: ignore[assignment]
        self.alive = True
        self.opened.append([])
        self.rounds.on_target_ready()

    def kill_drafter(self) -> None:
        self.workers.pop("draft-0", None)
        self.rounds.on_drafter_lost("draft-0", "draft worker draft-0 ended with code -9", self._now)

    def restart_drafter(self) -> None:
        self.link = self.links[0] = FakeLink("draft-0")
        drafter = ReplayDrafter(self.script)
        self.workers["draft-0"] = DraftWorker(self.link, drafter, FAN_OUT_POLICIES["best-first"])  # type: ignore[arg-type]
        self.rounds.on_drafter_ready("draft-0")

    def text_of(self, name: str) -> list[int]:
        committed = [event for event in self.events if isinstance(event, Committed) and event.request == name]
        return [token for event in committed for token in event.tokens]

    def end(self, name: str) -> RequestEnded | Failed:
        return next(e for e in self.events if isinstance(e, RequestEnded | Failed) and e.request == name)
