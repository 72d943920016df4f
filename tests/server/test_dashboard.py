"""docs/grafana.json uses only metrics of `/metrics`; each panel has a description and a unit."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running_server import RunningServer

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
UNITS = {"none", "short", "s", "percentunit", "bytes", "ops", "reqps"}


def queries(panel: Any) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def known(pair: RunningServer) -> dict[str, set[str]]:
    """The labels of each series of a server that has answered a request in each mode."""
    for mode in ("ar", "sd", "ssd"):
        asked = {"prompt": "def fibonacci(n):", "max_tokens": 40, "speculation": {"mode": mode}}
        httpx.post(f"{pair.url}/v1/completions", json=asked, timeout=200).raise_for_status()
    families = text_string_to_metric_families(httpx.get(f"{pair.url}/metrics").text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panel_queries_use_existing_series_and_labels(panel: Any, known: dict[str, set[str]]) -> None:
    for query in queries(panel):
        names = re.findall(r"outrider:\w+", query)
        assert names and set(names) <= known.keys()
        labels = set(re.findall(r"\b([a-z_]+)=", query))
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        for name in names:
            assert labels | grouped <= known[name], name
        shown = {label for target in panel["targets"] for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        assert shown <= set.intersection(*(known[name] for name in names))
        for name in re.findall(r"rate\((outrider:\w+)", query):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), "only what never falls has a rate"


def test_each_panel_has_title_unit_description_and_its_own_place() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert {panel["datasource"]["uid"], *(one["datasource"]["uid"] for one in panel["targets"])} == {
            "${datasource}"
        }
    for one, other in combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        apart = [one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at]
                 for at, size in (("x", "w"), ("y", "h"))]  # fmt: skip
        assert any(apart) and one["x"] + one["w"] <= 24


def test_variable_queries_use_existing_series(known: dict[str, set[str]]) -> None:
    asked = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    for query in asked:
        (name, label), *others = re.findall(r"label_values\((outrider:\w+), (\w+)\)", query["query"])
        assert label in known[name] and not others


def test_variables_used_in_panels_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used - {"__rate_interval"} == declared
