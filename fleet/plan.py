"""The description of a fleet: frozen, checked records, and the reader of fleet.yaml.

A record raises InvalidRequest if a value is out of range, or two contradict; the message names the key and the remedy.

YAML 1.2 rules apply: `on`, `off`, `yes` and `no` are strings, and duplicate keys are errors. Every error names the file
and the key. Nothing here asks Ray or another host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from outrider.fleet.host import Resources
from outrider.orchestrator.cli.flags import keys_beside
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.endpoints import reachable
from outrider.protocol.errors import EndpointError, InvalidRequest

PLACES = ("same-host", "other-host", "none")
MOST_ENGINES = 10_000
MOST_INGRESSES = 100
MOST_TRIES = 100
A_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """Who drafts for each placed engine. `on`: same-host, a worker beside the engine; other-host, one on a host that
    offers `needs`; none, only n-grams.
    """

    on: str = values.checked("same-host", partial(values.word, words=PLACES))
    needs: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.on == "none" and self.needs != Resources():
            raise InvalidRequest(f"on is none, but needs is {self.needs}; expected no needs, or a drafter")


@dataclass(frozen=True, slots=True)
class Scale:
    """Between `min` and `max` engines, so that each has about `requests_per_engine` in progress.

    Load is averaged over 30 s. An engine is added after `upscale_delay_s` seconds of too much load, and removed after
    `downscale_delay_s` of too little.
    """

    min: int = values.whole_field(1, 1, MOST_ENGINES)
    max: int = values.whole_field(1, 1, MOST_ENGINES)
    requests_per_engine: float = values.number_field(4, 0.1, 1024)
    upscale_delay_s: float = values.number_field(30, 0, A_DAY)
    downscale_delay_s: float = values.number_field(600, 0, A_DAY)

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.min > self.max:
            raise InvalidRequest(f"min is {self.min} and max {self.max}; expected min up to max")


@dataclass(frozen=True, slots=True)
class Placed:
    """Engines that Ray starts: `replicas`, each on a host that offers `needs`, and their drafters."""

    replicas: int = values.whole_field(1, 1, MOST_ENGINES)
    needs: Resources = field(default_factory=Resources)
    drafter: DrafterPlan = field(default_factory=DrafterPlan)

    def __post_init__(self) -> None:
        values.check_fields(self)
        try:
            self.bundle()
        except InvalidRequest as error:
            raise InvalidRequest(f"needs and drafter.needs on one host: {error}; or use on: other-host") from None

    def bundle(self) -> Resources:
        """Returns what an engine needs of its host, its drafter's needs included if that is on the same one."""
        if self.drafter.on != "same-host":
            return self.needs
        ours, theirs = self.needs, self.drafter.needs
        return Resources(*(getattr(ours, name) + getattr(theirs, name) for name in Resources.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """The ingress: `count` processes that serve HTTP on one port, with the settings `http`.

    `sessions`: requests with the same `x-session-id` go to the same engine. `tries`: engines tried for a text.
    """

    count: int = values.whole_field(1, 1, MOST_INGRESSES)
    sessions: bool = values.checked(True, values.flag)
    tries: int = values.whole_field(5, 1, MOST_TRIES)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        values.check_fields(self)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet: placed engines, attached engines (`outrider serve --endpoint`, run by someone else), and the ingress.

    `engine`: settings of placed engines, model names included; without placed engines, the ingress tokenizes with its
    `model`. `scale`: the number of placed engines by load, instead of `placed.replicas`.
    """

    engine: ServeSettings = field(default_factory=ServeSettings)
    placed: Placed | None = None
    attached: tuple[str, ...] = ()
    ingress: IngressPlan = field(default_factory=IngressPlan)
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if self.placed is None and not self.attached:
            raise InvalidRequest(
                "the fleet has no engine; expected placed (started by Ray), or attached with the endpoints of"
                " running servers"
            )
        if self.scale is not None and self.placed is None:
            raise InvalidRequest("scale adds placed engines, but there is no placed; expected both, or no scale")
        for one in self.attached:
            try:
                reachable(one)
            except EndpointError as error:
                raise InvalidRequest(f"attached: {error}") from None
        twice = [one for one, times in Counter(self.attached).items() if times > 1]
        if twice:
            raise InvalidRequest(f"attached names {twice[0]} twice; expected each server once")
        on = self.placed.drafter.on if self.placed is not None else ""
        if on == "none" and (model := self.engine.draft_model) is not None:
            raise InvalidRequest(f"draft_model is {model!r}, and placed.drafter is none; expected one or the other")
        if on == "other-host" and not self.engine.has_draft_worker:
            raise InvalidRequest(
                f"placed.drafter is on other-host, and draft_backend {self.engine.draft_backend} has no process of its"
                " own; expected mlx or coreml"
            )
        if on == "other-host" and self.engine.draft_model is None and self.engine.model is not None:
            raise InvalidRequest("placed.drafter has nothing to draft with; expected draft_model beside model")


Offers = Mapping[str, float]
"""A host's resources by Ray's names."""
BETTER = "run `outrider fleet join` on a host that does, or lower the needs"


def check_fits(placed: Placed, hosts: Sequence[Offers]) -> None:
    """Raises InvalidRequest if no host can run even one engine. Ray would wait for such a host forever. Resources in
    use count as available."""
    engine, drafter = placed.bundle(), placed.drafter
    engines = _with(engine, hosts)
    if not engines:
        raise InvalidRequest(f"placed needs {engine}, but no host of the fleet offers that; {BETTER}")
    if drafter.on != "other-host":
        return
    drafters = _with(drafter.needs, hosts)
    if not drafters or engines == drafters == engines[:1]:
        raise InvalidRequest(
            f"placed.drafter on other-host needs {drafter.needs}, but no host except the engine's offers that; {BETTER}"
        )


def _with(needs: Resources, hosts: Sequence[Offers]) -> list[int]:
    """Returns the hosts that offer `needs`."""
    asked = needs.as_ray()
    return [n for n, offers in enumerate(hosts) if all(offers.get(name, 0) >= many for name, many in asked.items())]


TOP = ("model", "draft_model", "engine", "placed", "attached", "ingress", "scale")
RESERVED = ("model", "draft_model", "endpoint", "workers_endpoint", "advertise", "await_target", "keyed")
"""Server settings that the fleet sets itself, or that stand elsewhere in the file."""
ENGINE = tuple(field.name for field in fields(ServeSettings) if field.name not in RESERVED)
HTTP = ("host", "port", "api_keys", "cors_origins", "model_names", "max_body_mb", "request_timeout",
        "max_streams_per_key")  # fmt: skip
INGRESS = ("count", "sessions", "tries", "api_key_file", *HTTP)
LISTS = ("api_keys", "cors_origins", "model_names")

Record = TypeVar("Record")


def read_plan(path: Path) -> FleetPlan:
    """Reads a fleet.yaml.

    Raises:
        InvalidRequest: it can't be read, or is invalid.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} can't be read ({error}); expected a fleet.yaml (docs/fleet.md)") from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise InvalidRequest(f"{path} is not YAML: {why}; expected a fleet.yaml (docs/fleet.md)") from None
    try:
        return plan_of(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from None


def plan_of(found: object) -> FleetPlan:
    """Converts parsed YAML. Raises InvalidRequest."""
    given = _section("the fleet", found, TOP)
    placed = _read("placed", Placed, given["placed"]) if "placed" in given else None
    if "scale" in given and isinstance(given.get("placed"), Mapping) and "replicas" in given["placed"]:
        raise InvalidRequest("scale replaces placed.replicas, but both are given; expected one of them")
    scale = _read("scale", Scale, given["scale"]) if "scale" in given else None
    attached = _words("attached", given["attached"]) if given.get("attached") is not None else ()
    return FleetPlan(_engine(given, placed), placed, attached, _ingress(given.get("ingress")), scale)


def _engine(given: Mapping[str, Any], placed: Placed | None) -> ServeSettings:
    """Returns the engines' settings, model names included."""
    settings = {name: given[name] for name in ("model", "draft_model") if given.get(name) is not None}
    settings |= _section("engine", given.get("engine"), ENGINE)
    drafts = placed is None or placed.drafter.on != "none" or "draft_model" in settings
    if drafts or settings.get("draft_backend", "mlx") != "mlx":
        return _record("engine", ServeSettings, settings)
    return _record("engine, whose placed.drafter is none", ServeSettings, {**settings, "draft_backend": "none"})


_INNER: dict[str, type[Any]] = {"needs": Resources, "drafter": DrafterPlan}
"""The keys of a section that hold a section themselves."""


def _read(name: str, kind: type[Record], found: object) -> Record:
    """Reads a section whose keys are the fields of `kind`; a drafter's may also be its place alone."""
    if kind is DrafterPlan and isinstance(found, str):
        found = {"on": found}
    given = _section(name, found, tuple(field.name for field in fields(kind)))  # type: ignore[arg-type]
    inner = {key: _read(f"{name}.{key}", _INNER[key], given[key]) for key in _INNER if key in given}
    return _record(name, kind, given | inner)


def _ingress(found: object) -> IngressPlan:
    given = _section("ingress", found, INGRESS)
    http = {name: given.pop(name) for name in HTTP if name in given}
    http |= {name: _words(f"ingress.{name}", http[name]) for name in LISTS if name in http}
    file = given.pop("api_key_file", None)
    path = values.path("ingress.api_key_file", file).expanduser() if file is not None else None
    http["api_keys"] = (*http.get("api_keys", ()), *keys_beside(path))
    try:
        return _record("ingress", IngressPlan, {**given, "http": _record("ingress", HttpSettings, http)})
    except InvalidRequest as error:
        if http["api_keys"] or "API key" not in str(error):
            raise
        raise InvalidRequest(
            f"ingress.host {http['host']} is reachable from other machines and needs an API key; expected"
            " ingress.api_keys, ingress.api_key_file or OUTRIDER_API_KEY, or a host of loopback such as 127.0.0.1"
        ) from None


def _words(name: str, found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidRequest(f"{name} is {found!r}; expected a list of strings, with quotes around numbers")
    return tuple(found)


def _section(name: str, found: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Returns a section's keys; empty if it is missing. Unknown keys are errors."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{name} is {found!r}; expected keys and values, of {', '.join(known)}")
    for key in found:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            why = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            if key in RESERVED:
                why = "the fleet sets it itself, or another part of the file does; omit it"
            raise InvalidRequest(f"{name} has the key {key!r}; {why}")
    return dict(found)


def _record(name: str, made: type[Record], given: Mapping[str, Any]) -> Record:
    """Creates a record; errors are prefixed with `name`."""
    try:
        return made(**given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


class Loader(yaml.SafeLoader):
    """A YAML 1.2 loader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is duplicated", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
