"""The plan of a simulation: traffic, fleet, routing, scaling and losses, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.orchestrator.settings import DEFAULT_BRANCHES, DEFAULT_DRAFT_TOKENS
from outrider.protocol.errors import InvalidRequest
from tools.simulation.profile import Profile

ROUTINGS = ("power-of-two", "least", "sessions")
LOSSES = ("zone", "drafters")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A log-normal distribution of token counts, limited to `most`."""

    median: int
    sigma: float = 0.6
    most: int = 2048


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions that begin as a Poisson process and send `rate` requests per second in all, for `seconds`.

    A session has `turns` requests on average (geometric). Each follows the previous answer after `think` seconds on
    average (exponential), and its prompt is the whole conversation with `prompt` more tokens.
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
    """Ray Serve's rule: one engine for `each` running or waiting request, between `least` and `most` engines. A change
    must be wanted for `up` or `down` seconds; a new engine serves after `start` seconds."""

    least: int
    most: int
    each: float
    up: float = 30.0
    down: float = 600.0
    start: float = 20.0


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a zone at second `at`, with its engines and drafters (`zone`) or only its drafters (`drafters`). It
    returns after `back` seconds (None: never). The loss is noticed after `engine` or `drafter` seconds."""

    what: str
    at: float
    back: float | None = None
    engine: float = 0.53
    drafter: float = 2.0

    def __post_init__(self) -> None:
        if self.what not in LOSSES:
            raise InvalidRequest(f"lose is {self.what}; expected one of {', '.join(LOSSES)}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """`engines` with `drafters` each on other hosts, in `zones`; engine n uses profile n, modulo their number.

    `spread`: an engine's drafters are spread over all zones; else they are in its own. `active`: requests that an
    engine runs concurrently; `ongoing`: requests that the ingress gives it. `prompt_rate`: prompt tokens per second.
    `remembers`: tokens of ended texts in the prompt cache. `branches`: of all drafters together.
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
    depth: int = DEFAULT_DRAFT_TOKENS
    branches: int = DEFAULT_BRANCHES
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
        """Returns how many of an engine's drafters are in this zone."""
        if not self.spread:
            return self.drafters if self.zone(engine) == zone else 0
        return len(range((zone - self.zone(engine)) % self.zones, self.drafters, self.zones))
