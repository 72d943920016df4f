"""docs/grafana.json satisfies Grafana's schema, as in its foundation SDK for Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

Dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard").Dashboard
JSONEncoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")

FILE = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
MODELS = "grafana_foundation_sdk.models."


@pytest.fixture(scope="module", autouse=True)
def kinds_of_panels() -> None:
    plugins.register_default_plugins()


def round_trip(dashboard: Any) -> Any:
    """Reads a dashboard into Grafana's model and writes it again."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def changed_paths(given: Any, known: Any, where: str = "") -> Iterator[str]:
    """Returns the paths of given values that are unknown or have changed."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            yield from changed_paths(value, known[name], f"{where}/{name}") if name in known else [f"{where}/{name}"]
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from changed_paths(one, other, f"{where}/{index}")
    elif given != known:
        yield where


def mistyped_paths(thing: Any, where: str = "") -> Iterator[str]:
    """Returns the paths of values that are not of their field's type in the schema."""
    if isinstance(thing, list | dict):
        for name, value in enumerate(thing) if isinstance(thing, list) else thing.items():
            yield from mistyped_paths(value, f"{where}/{name}")
    elif type(thing).__module__.startswith(MODELS) and hasattr(thing, "__dict__"):
        for name, adapter in adapters(type(thing)).items():
            value = getattr(thing, name)
            yield from mistyped_paths(value, f"{where}/{name}") if fits(adapter, value) else [f"{where}/{name}"]


@cache
def adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    settings = ConfigDict(arbitrary_types_allowed=True)
    return {name: TypeAdapter(hint, config=settings) for name, hint in get_type_hints(kind).items()}


def fits(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        return bool(adapter.validate_python(value) == value)
    except ValidationError:
        return False


def test_dashboard_round_trips_through_grafanas_model() -> None:
    assert list(changed_paths(FILE, round_trip(FILE))) == []


def test_each_value_has_the_type_of_the_schema() -> None:
    dashboard = Dashboard.from_json(FILE)
    assert list(mistyped_paths(dashboard)) == []
    for panel in (panel for panel in dashboard.panels if panel.type_val != "row"):
        assert type(panel.options).__module__ == MODELS + panel.type_val.replace("-", ""), "its options are unchecked"


@pytest.mark.parametrize("place", ["graphTooltip", "title", "tags", "panels/1/gridPos/w", "panels/1/options/graphMode"])
def test_value_of_another_type_is_detected(place: str) -> None:
    broken = deepcopy(FILE)
    *above, name = place.split("/")
    thing = broken
    for step in above:
        thing = thing[int(step) if isinstance(thing, list) else step]
    assert name in thing
    thing[name] = {"of": "another type"}
    assert len(list(mistyped_paths(Dashboard.from_json(broken)))) == 1


def test_setting_unknown_to_grafana_is_detected() -> None:
    broken = deepcopy(FILE)
    broken["panels"][1]["options"]["colourMode"] = "value"
    assert list(changed_paths(broken, round_trip(broken))) == ["/panels/1/options/colourMode"]
