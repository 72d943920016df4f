"""The description of a fleet: frozen, checked records, and the reader of fleet.yaml.

A record raises InvalidRequest if a value is out of range, or two contradict; the message names the key and the remedy.
Every error names the file and the key. Nothing here contacts Ray or another host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, TypeVar

import yaml

from outrider.fleet.host import Resources
from outrider.orchestrator.cli.flags import read_api_keys, read_text_file
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.pairing.model_files import TINY
from outrider.orchestrator.pairing.pulled import PULLED_MODELS
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.endpoints import parse_reachable
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.heads import TARGET_HEADS

DRAFTER_PLACES = ("same-host", "other-host", "none")
MAX_ENGINES = 10_000
MAX_INGRESSES = 100
MAX_TRIES = 100
DAY_SECONDS = 86_400.0

Offers = Mapping[str, float]
"""A host's resources by our names."""

REMEDY = "run `outrider fleet join` on a host that does, or lower the needs"
TOP_KEYS = ("model", "draft_model", "engine", "placed", "attached", "ingress", "scale")
RESERVED_SETTINGS = ("model", "draft_model", "endpoint", "workers_endpoint", "advertise", "await_target", "keyed")
"""Server settings that the fleet sets itself, or that have another place in the file."""

PATHS = ("model", "draft_model", "head", "draft_prefill", "ngram_table", "keys", "trace")
"""Server settings that may be paths."""
NAMES = (TINY, *PULLED_MODELS, *TARGET_HEADS, "auto", "mlx", "coreml")
"""Their values that are names, even if there is a folder of that name."""

ENGINE_KEYS = tuple(field.name for field in fields(ServeSettings) if field.name not in RESERVED_SETTINGS)
INGRESS_KEYS = ("count", "sessions", "tries", "api_key_file", "host", "port", "api_keys", "cors_origins", "model_names",
        "max_body_mb", "request_timeout", "max_streams_per_key")  # fmt: skip
LIST_KEYS = ("api_keys", "cors_origins", "model_names")

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """What drafts for each placed engine. `on`: same-host, a worker on its host; other-host, one on another host that
    offers `needs`; none, only n-grams.
    """

    on: str = values.checked_field("same-host", partial(values.check_choice, words=DRAFTER_PLACES))
    needs: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.on == "none" and self.needs != Resources():
            raise InvalidRequest(f"needs is {self.needs}, but on: none starts no drafter; leave out one of them")


@dataclass(frozen=True, slots=True)
class Scale:
    """Scales between `min` and `max` engines, so that each has about `requests_per_engine` in progress.

    Load is averaged over 30 s. An engine is added after `upscale_delay_s` seconds of too much load, and removed after
    `downscale_delay_s` of too little.
    """

    min: int = values.int_field(1, 1, MAX_ENGINES)
    max: int = values.int_field(1, 1, MAX_ENGINES)
    requests_per_engine: float = values.float_field(4, 0.1, 1024)
    upscale_delay_s: float = values.float_field(30, 0, DAY_SECONDS)
    downscale_delay_s: float = values.float_field(600, 0, DAY_SECONDS)

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.min > self.max:
            raise InvalidRequest(f"min is {self.min} and max is {self.max}; expected min to be at most max")


@dataclass(frozen=True, slots=True)
class Placed:
    """Engines that Ray starts: `replicas`, each on a host that offers `needs`, and their drafters."""

    replicas: int = values.int_field(1, 1, MAX_ENGINES)
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
class IngressPlan(HttpSettings):
    """The ingress: `count` processes that serve HTTP on one port, with the same settings as a server's.

    `sessions`: requests with the same `x-session-id` go to the same engine. `tries`: engines tried for a text.
    """

    count: int = values.int_field(1, 1, MAX_INGRESSES)
    sessions: bool = values.checked_field(True, values.check_bool)
    tries: int = values.int_field(5, 1, MAX_TRIES)


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
            raise InvalidRequest("scale adds placed engines, but placed is missing; expected both, or no scale")
        for one in self.attached:
            try:
                parse_reachable(one)
            except EndpointError as error:
                raise InvalidRequest(f"attached: {error}") from None
        if twice := [one for one, times in Counter(self.attached).items() if times > 1]:
            raise InvalidRequest(f"attached names {twice[0]} twice; expected each server once")
        on = self.placed.drafter.on if self.placed is not None else ""
        if on == "none" and (model := self.engine.draft_model) is not None:
            raise InvalidRequest(f"draft_model is {model!r}, and placed.drafter is none; leave out one of the two")
        if on != "other-host":
            return
        if not self.engine.has_draft_worker:
            raise InvalidRequest(
                f"placed.drafter is on other-host, and draft_backend {self.engine.draft_backend} has no process of its"
                " own; expected mlx or coreml"
            )
        for name, only in (("drafters", 1), ("head_in", "target")):
            if (given := getattr(self.engine, name)) != only:
                raise InvalidRequest(f"placed.drafter is on other-host, and engine.{name} is {given}; expected {only}")
        if self.engine.lacks_draft_model:
            raise InvalidRequest("placed.drafter has no draft model; expected draft_model in addition to model")


def check_fits(placed: Placed, hosts: Sequence[Offers]) -> None:
    """Raises InvalidRequest if no host can run even one engine. Ray would wait for such a host forever. Resources in
    use count as available."""
    engine, drafter = placed.bundle(), placed.drafter
    engines = _matching_hosts(engine, hosts)
    if not engines:
        raise InvalidRequest(f"placed needs {engine}, but no host of the fleet offers that; {REMEDY}")
    if drafter.on != "other-host":
        return
    drafters = _matching_hosts(drafter.needs, hosts)
    if not drafters or engines == drafters == engines[:1]:
        raise InvalidRequest(
            f"placed.drafter on other-host needs {drafter.needs}, but no host except the engine's offers that; {REMEDY}"
        )


def _matching_hosts(needs: Resources, hosts: Sequence[Offers]) -> list[int]:
    """Returns the hosts that offer `needs`."""
    required = asdict(needs)
    return [n for n, offers in enumerate(hosts) if all(offers[name] >= many for name, many in required.items())]


def read_plan(path: Path) -> FleetPlan:
    """Reads a fleet.yaml.

    Raises:
        InvalidRequest: it can't be read, or is invalid.
    """
    try:
        found = yaml.load(read_text_file(path, "a fleet.yaml (docs/fleet.md)"), Loader)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise InvalidRequest(f"{path} is not YAML: {why}; expected a fleet.yaml (docs/fleet.md)") from None
    try:
        return parse_plan(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from None


def parse_plan(found: object) -> FleetPlan:
    """Converts parsed YAML. Raises InvalidRequest."""
    given = _section_keys("the fleet", found, TOP_KEYS)
    placed = _read_section("placed", Placed, given["placed"]) if "placed" in given else None
    if "scale" in given and isinstance(given.get("placed"), Mapping) and "replicas" in given["placed"]:
        raise InvalidRequest("scale replaces placed.replicas, but both are given; expected one of them")
    scale = _read_section("scale", Scale, given["scale"]) if "scale" in given else None
    attached = _check_strings("attached", given["attached"]) if given.get("attached") is not None else ()
    engine = make_paths_absolute(_engine_settings(given, placed))
    return FleetPlan(engine, placed, attached, _ingress_plan(given.get("ingress")), scale)


def make_paths_absolute(settings: ServeSettings) -> ServeSettings:
    """Makes the paths of an engine absolute, because it runs in another directory; other names stay as they are."""
    return replace(settings, **{name: _make_absolute(getattr(settings, name)) for name in PATHS})


def _make_absolute(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(map(_make_absolute, given))
    if not given or given in NAMES:
        return given
    path = Path(given).expanduser()
    return str(path.absolute()) if isinstance(given, Path) or path.exists() else given


def _engine_settings(given: Mapping[str, Any], placed: Placed | None) -> ServeSettings:
    """Returns the engines' settings, model names included."""
    settings = {name: given[name] for name in ("model", "draft_model") if given.get(name) is not None}
    settings |= _section_keys("engine", given.get("engine"), ENGINE_KEYS)
    drafts = placed is None or placed.drafter.on != "none" or "draft_model" in settings
    if drafts or settings.get("draft_backend", "mlx") != "mlx":
        return _make_record("engine", ServeSettings, settings)
    return _make_record("engine, whose placed.drafter is none", ServeSettings, {**settings, "draft_backend": "none"})


_SUBSECTIONS: dict[str, type[Any]] = {"needs": Resources, "drafter": DrafterPlan}
"""The keys of a section that hold a section themselves."""


def _read_section(name: str, kind: type[Record], found: object) -> Record:
    """Reads a section whose keys are the fields of `kind`; a drafter may also be given as its `on` alone."""
    if kind is DrafterPlan and isinstance(found, str):
        found = {"on": found}
    given = _section_keys(name, found, tuple(field.name for field in fields(kind)))  # type: ignore[arg-type]
    inner = {key: _read_section(f"{name}.{key}", _SUBSECTIONS[key], given[key]) for key in _SUBSECTIONS if key in given}
    return _make_record(name, kind, given | inner)


def _ingress_plan(found: object) -> IngressPlan:
    given = _section_keys("ingress", found, INGRESS_KEYS)
    given |= {name: _check_strings(f"ingress.{name}", given[name]) for name in LIST_KEYS if name in given}
    file = given.pop("api_key_file", None)
    path = values.check_path("ingress.api_key_file", file).expanduser() if file is not None else None
    given["api_keys"] = (*given.get("api_keys", ()), *read_api_keys(path))
    return _make_record("ingress", IngressPlan, given)


def _check_strings(name: str, found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidRequest(f"{name} is {found!r}; expected a list of strings, with quotes around numbers")
    return tuple(found)


def _section_keys(name: str, found: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Returns a section's keys; empty if it is missing. Unknown keys are errors."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{name} is {shorten(found)}; expected keys and values; the keys are {', '.join(known)}")
    for key in found:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            why = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            if key in RESERVED_SETTINGS:
                why = "the fleet sets it itself, or another part of the file does; omit it"
            raise InvalidRequest(f"{name} has the key {key!r}; {why}")
    return dict(found)


def _make_record(name: str, made: type[Record], given: Mapping[str, Any]) -> Record:
    """Creates a record; errors are prefixed with `name`."""
    try:
        return made(**given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


class Loader(yaml.SafeLoader):
    """A YAML 1.2 loader: `on`, `off`, `yes` and `no` are strings. Rejects duplicate keys."""

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
