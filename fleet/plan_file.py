"""fleet.yaml read into a `FleetPlan`: what is misspelt or out of range is one sentence that names the key and the file.

YAML as version 1.2 has it: `on`, `off`, `yes` and `no` are words and not true or false, and no key comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from outrider.fleet.host import Resources
from outrider.fleet.plan import GATE_PORT, DrafterPlan, FleetPlan, IngressPlan, Placed, Scale, without_drafter
from outrider.orchestrator.cli.flags import keys_in, keys_in_environment
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest

TOP = ("model", "draft_model", "engine", "placed", "attached", "gate", "scale")
OF_FLEET = ("model", "draft_model", "endpoint", "workers_endpoint", "advertise", "await_target", "keyed")
"""Settings of a server that a fleet says elsewhere, or that are not for anybody to say."""
ENGINE = tuple(field.name for field in fields(ServeSettings) if field.name not in OF_FLEET)
HTTP = ("host", "port", "api_keys", "cors_origins", "model_names", "max_body_mb", "request_timeout",
        "max_streams_per_key")  # fmt: skip
GATE = ("count", "sessions", "tries", "api_key_file", *HTTP)
LISTS = ("api_keys", "cors_origins", "model_names")

Record = TypeVar("Record")


def read_plan(path: Path) -> FleetPlan:
    """The fleet that the file describes.

    Raises:
        InvalidRequest: it can't be read, or describes none.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} can't be read ({error}); expected a fleet.yaml (docs/fleet.md)") from None
    except yaml.YAMLError as error:
        raise InvalidRequest(
            f"{path} is not YAML: {_in_a_line(error)}; expected a fleet.yaml (docs/fleet.md)"
        ) from None
    try:
        return plan_of(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from None


def plan_of(found: object) -> FleetPlan:
    """The fleet that these keys and values describe. Raises InvalidRequest."""
    given = _section("the fleet", found, TOP)
    placed = _placed(given["placed"]) if "placed" in given else None
    scale = _scale(given["scale"], given.get("placed")) if "scale" in given else None
    attached = _attached(given.get("attached"))
    return FleetPlan(_engine(given, placed), placed, attached, _gate(given.get("gate")), scale)


def _engine(given: Mapping[str, Any], placed: Placed | None) -> ServeSettings:
    """The settings of each engine, both models' names among them."""
    section = _section("engine", given.get("engine"), ENGINE)
    models = {name: given[name] for name in ("model", "draft_model") if given.get(name) is not None}
    settings = _record("engine", ServeSettings, {**models, **section})
    drafts = placed is None or placed.drafter.on != "none"
    return (
        settings
        if drafts or settings.draft_model
        else _record("placed.drafter is none", without_drafter, {"engine": settings})
    )


def _placed(found: object) -> Placed:
    given = _section("placed", found, ("replicas", "needs", "drafter"))
    if "needs" in given:
        given["needs"] = _needs("placed.needs", given["needs"])
    if "drafter" in given:
        given["drafter"] = _drafter(given["drafter"])
    return _record("placed", Placed, given)


def _drafter(found: object) -> DrafterPlan:
    """A drafter's place alone, or with what it needs."""
    if isinstance(found, str):
        found = {"on": found}
    given = _section("placed.drafter", found, ("on", "needs"))
    if "needs" in given:
        given["needs"] = _needs("placed.drafter.needs", given["needs"])
    return _record("placed.drafter", DrafterPlan, given)


def _scale(found: object, placed: object) -> Scale:
    if isinstance(placed, Mapping) and "replicas" in placed:
        raise InvalidRequest("scale is in place of placed.replicas, and both are there; expected one of them")
    return _record("scale", Scale, _section("scale", found, tuple(Scale.__dataclass_fields__)))


def _needs(name: str, found: object) -> Resources:
    return _record(name, Resources, _section(name, found, tuple(Resources.__dataclass_fields__)))


def _attached(found: object) -> tuple[str, ...]:
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidRequest("attached is not a list of endpoints; expected for example [tcp://10.0.0.11:7777]")
    return tuple(found)


def _gate(found: object) -> IngressPlan:
    given = _section("gate", found, GATE)
    http = {"port": GATE_PORT, **{name: given.pop(name) for name in HTTP if name in given}}
    for name in LISTS:
        if name in http:
            http[name] = _words(f"gate.{name}", http[name])
    file = given.pop("api_key_file", None)
    from_file = keys_in(Path(file).expanduser() if file is not None else None)
    http["api_keys"] = (*http.get("api_keys", ()), *from_file, *keys_in_environment())
    try:
        return _record("gate", IngressPlan, {**given, "http": _record("gate", HttpSettings, http)})
    except InvalidRequest as error:
        if http["api_keys"] or "API key" not in str(error):
            raise
        raise InvalidRequest(
            f"gate.host {http['host']} is reachable from other machines and needs an API key; expected gate.api_keys,"
            " gate.api_key_file or OUTRIDER_API_KEY, or a host of loopback such as 127.0.0.1"
        ) from None


def _words(name: str, found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidRequest(f"{name} is {found!r}; expected a list of texts, in quotes where they are numbers")
    return tuple(found)


def _section(name: str, found: object, known: tuple[str, ...]) -> dict[str, Any]:
    """A part of the file with only the keys that are known there; empty where nothing is said."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{name} is {found!r}; expected keys and values, of {', '.join(known)}")
    for key in found:
        if key not in known:
            raise InvalidRequest(f"{name} has the key {key!r}; {_meant(str(key), known)}")
    return dict(found)


def _meant(word: str, known: tuple[str, ...]) -> str:
    if word in OF_FLEET:
        return "that is the fleet's own choice, or stands beside it; leave it out"
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"


def _record(name: str, made: Callable[..., Record], given: Mapping[str, Any]) -> Record:
    """The record, whose own complaint begins with a field's name."""
    try:
        return made(**given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None
    except (TypeError, AttributeError):
        raise InvalidRequest(f"{name} has a value of a wrong kind among {dict(given)}; see docs/fleet.md") from None


class Loader(yaml.SafeLoader):
    """YAML 1.2's true and false, and each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _in_a_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())
