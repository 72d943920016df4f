"""What is simulated: who asks, what there is, how requests find an engine, and what goes wrong. Frozen records only."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.orchestrator.settings import BRANCHES, DRAFT_TOKENS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.profile import Profile

ROUTINGS = ("power-of-two", "least", "sessions")
LOSSES = ("zone", "drafters")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, by a log-normal distribution: its median, and how wide it is; `most` at the most."""

    median: int
    sigma: float = 0.6
    most: int = 2048


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions that begin as a Poisson process, so that `rate` requests a second come of them, for `seconds`.

    A session has `turns` requests in the mean (geometric); the next comes a `think` time (exponential mean, seconds)
    after the last one's answer, and its prompt is all before with `prompt` more tokens.
    """

    rate: float
    seconds: float
    prompt: Sizes = Sizes(150)
    answer: Sizes = Sizes(120)
    turns: float = 2.0
    think: float = 8.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """As many engines as hold `each` requests of those that run or wait, as Ray Serve has it: between `least` and
    `most`, once that was so for `up` or `down` seconds; a new engine serves after `start` seconds."""

    least: int
    most: int
    each: float
    up: float = 30.0
    down: float = 600.0
    start: float = 20.0


@dataclass(frozen=True, slots=True)
class Loss:
    """At second `at` a zone goes with its engines and drafters (`zone`), or its drafters only (`drafters`); it is back
    after `back` seconds, None: never. Engines' loss is noticed after `engine` seconds, drafters' after `drafter`."""

    what: str
    at: float
    back: float | None = None
    engine: float = 0.53
    drafter: float = 2.0

    def __post_init__(self) -> None:
        if self.what not in LOSSES:
            raise InvalidRequest(f"what is lost is {self.what}; expected one of {', '.join(LOSSES)}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """`engines` with `drafters` each, on other hosts, in so many `zones`; the n-th is the n-th profile's machine.

    `spread`: an engine's drafters stand in all zones in turn; else in its own. `active`: requests that run on an engine
    at once; `ongoing`: that the gate hands it. `prompt_rate`: prompt tokens a second. `remembers`: tokens of ended
    texts. `branches`: of all drafters together.
    """

    profiles: tuple[Profile, ...]
    engines: int = 100
    drafters: int = 10
    zones: int = 3
    spread: bool = False
    active: int = 4
    ongoing: int = 5
    prompt_rate: float = 120.0
    remembers: int = 32768
    hop_ms: float = 0.2
    mode: str = "auto"
    depth: int = DRAFT_TOKENS
    branches: int = BRANCHES
    routing: str = "power-of-two"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise InvalidRequest(f"routing is {self.routing}; expected one of {', '.join(ROUTINGS)}")

    def profile(self, engine: int) -> Profile:
        return self.profiles[engine % len(self.profiles)]

    def zone(self, engine: int) -> int:
        return engine % self.zones

    def drafters_in(self, zone: int, engine: int) -> int:
        """How many of an engine's drafters stand in this zone."""
        if not self.spread:
            return self.drafters if self.zone(engine) == zone else 0
        return len(range((zone - self.zone(engine)) % self.zones, self.drafters, self.zones))
