"""What a fleet is to be: frozen records, each checked once, here and nowhere else. `plan_file` reads them.

Knows names and ranges; asks neither Ray nor any host, and opens no file and no socket.

`check_fits`: whether a fleet has hosts for what a plan asks of them: told at once, for Ray would wait for such a host
for ever. Compares what is asked with what each host offers as a whole; what is in use there does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.fleet.host import Resources
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.endpoints import reachable
from outrider.protocol.errors import EndpointError, InvalidRequest

PLACES = ("same-host", "other-host", "none")
MOST_ENGINES = 10_000
MOST_GATES = 100
MOST_TRIES = 100
GATE_PORT = 8080
A_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """Who drafts for each placed engine. `on`: a worker of the engine's own, on its host; one on another host, which
    has to offer `needs`; or none, so that only texts themselves are copied from.

    Raises:
        InvalidRequest: see `FleetPlan`.
    """

    on: str = "same-host"
    needs: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        values.word("on", self.on, PLACES)
        if self.on == "none" and self.needs != Resources():
            raise InvalidRequest(f"on is none, and needs asks for {self.needs}; expected no needs, or a drafter")


@dataclass(frozen=True, slots=True)
class Scale:
    """From `min` to `max` engines, so that each has about `requests_per_engine` under way.

    Load is the mean of half a minute; an engine comes when it has asked for one for `upscale_delay_s` seconds, and goes
    when it has not for `downscale_delay_s`.

    Raises:
        InvalidRequest: see `FleetPlan`.
    """

    min: int = 1
    max: int = 1
    requests_per_engine: float = 4
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600

    def __post_init__(self) -> None:
        values.whole("min", self.min, 1, MOST_ENGINES)
        values.whole("max", self.max, 1, MOST_ENGINES)
        values.number("requests_per_engine", self.requests_per_engine, 0.1, 1024)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            values.number(name, getattr(self, name), 0, A_DAY)
        if self.min > self.max:
            raise InvalidRequest(f"min is {self.min} and max {self.max}; expected min up to max")


@dataclass(frozen=True, slots=True)
class Placed:
    """Engines that Ray starts: `replicas` of them, each on a host that offers `needs`, and their drafters.

    Raises:
        InvalidRequest: see `FleetPlan`.
    """

    replicas: int = 1
    needs: Resources = field(default_factory=Resources)
    drafter: DrafterPlan = field(default_factory=DrafterPlan)

    def __post_init__(self) -> None:
        values.whole("replicas", self.replicas, 1, MOST_ENGINES)
        if self.drafter.on == "same-host":
            self._check_one_host()

    def _check_one_host(self) -> None:
        """A drafter in the engine's host needs it together with the engine."""
        try:
            self.bundle()
        except InvalidRequest as error:
            raise InvalidRequest(f"needs and drafter.needs, on one host: {error}; or drafter on other-host") from None

    def bundle(self) -> Resources:
        """What an engine needs of its own host."""
        if self.drafter.on != "same-host":
            return self.needs
        ours, theirs = self.needs, self.drafter.needs
        return Resources(*(getattr(ours, name) + getattr(theirs, name) for name in Resources.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """What users talk to: `count` processes that serve HTTP as `http` says (one port for all of them).

    `sessions`: requests with the same `x-session-id` go to the same engine. `tries`: how many engines a text is asked
    of until it is given up.

    Raises:
        InvalidRequest: see `FleetPlan`.
    """

    count: int = 1
    sessions: bool = True
    tries: int = 5
    http: HttpSettings = field(default_factory=lambda: HttpSettings(port=GATE_PORT))

    def __post_init__(self) -> None:
        values.whole("count", self.count, 1, MOST_GATES)
        values.flag("sessions", self.sessions)
        values.whole("tries", self.tries, 1, MOST_TRIES)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet: engines that Ray places, engines that are attached (`outrider serve --endpoint`, kept up by somebody
    else), and the gate before them.

    `engine`: the settings of each placed engine, both models' names in it; where none is placed, `model` is what the
    gate reads texts with. `scale`: how many are placed by load, in place of `placed.replicas`.

    Raises:
        InvalidRequest: a value is out of range or two don't go together; the message names the key and what to do.
    """

    engine: ServeSettings = field(default_factory=ServeSettings)
    placed: Placed | None = None
    attached: tuple[str, ...] = ()
    gate: IngressPlan = field(default_factory=IngressPlan)
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if self.placed is None and not self.attached:
            raise InvalidRequest(
                "the fleet has no engine; expected placed (Ray starts them), or attached with the endpoints of"
                " servers that run"
            )
        if self.scale is not None and self.placed is None:
            raise InvalidRequest("scale adds placed engines, and there is no placed; expected placed beside it")
        self._check_attached()
        self._check_drafter()

    @property
    def model(self) -> str | None:
        """The target's name as it was written; None: the default's."""
        return self.engine.model

    @property
    def draft_model(self) -> str | None:
        """The draft model's, the same way."""
        return self.engine.draft_model

    @property
    def most_engines(self) -> int:
        """How many engines there may be at once."""
        if self.placed is None:
            return len(self.attached)
        return len(self.attached) + (self.placed.replicas if self.scale is None else self.scale.max)

    def _check_attached(self) -> None:
        for one in self.attached:
            try:
                reachable(one)
            except EndpointError as error:
                raise InvalidRequest(f"attached: {error}") from None
        twice = [one for one, times in Counter(self.attached).items() if times > 1]
        if twice:
            raise InvalidRequest(f"attached names {twice[0]} twice; expected each server once")

    def _check_drafter(self) -> None:
        if self.placed is None:
            return
        on = self.placed.drafter.on
        if on == "none" and self.draft_model is not None:
            raise InvalidRequest(
                f"draft_model is {self.draft_model!r}, and placed.drafter is none; expected one or the other"
            )
        if on == "other-host" and not self.engine.has_draft_worker:
            raise InvalidRequest(
                f"placed.drafter is on other-host, and draft_backend {self.engine.draft_backend} has no process of its"
                " own; expected mlx, coreml or replay"
            )
        if on == "other-host" and self.engine.draft_model is None and self.engine.model is not None:
            raise InvalidRequest("placed.drafter has nothing to draft with; expected draft_model beside model")


def without_drafter(engine: ServeSettings) -> ServeSettings:
    """The same engine with nobody who drafts, where it did not say otherwise itself."""
    return replace(engine, draft_backend="none") if engine.draft_backend == "mlx" else engine


Offers = Mapping[str, float]
"""A host's resources by Ray's names."""
BETTER = "expected `outrider fleet join` on a host that does, or to ask for less"


def check_fits(placed: Placed, hosts: Sequence[Offers]) -> None:
    """Raises InvalidRequest where not even one engine would find its place."""
    engine, drafter = placed.bundle(), placed.drafter
    engines = _with(engine, hosts)
    if not engines:
        raise InvalidRequest(f"placed needs {engine}, and no host of the fleet offers that; {BETTER}")
    if drafter.on != "other-host":
        return
    drafters = _with(drafter.needs, hosts)
    if not drafters or engines == drafters == engines[:1]:
        raise InvalidRequest(
            f"placed.drafter on other-host needs {drafter.needs}, and no host beside the engine's offers that; {BETTER}"
        )


def _with(needs: Resources, hosts: Sequence[Offers]) -> list[int]:
    """Which hosts offer that."""
    asked = needs.as_ray()
    return [n for n, offers in enumerate(hosts) if all(offers.get(name, 0) >= many for name, many in asked.items())]
