"""All cases of docs/conformance.md that pass there still pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.conformance.case import DIFFERS, PASSES, REFUSED, Case, Cases, Outcome, Servers, run_case
from tests.harness.conformance.families import FAMILIES
from tests.harness.conformance.http_client import Server
from tests.harness.conformance.requests import CHAT, HELLO
from tests.harness.conformance.table import cell, page, passing
from tests.server.running_server import RunningServer

PAGE = passing((Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8"))
EVERY = [pytest.param(case, id=f"{family.title}-{place}") for family in FAMILIES for place, case in enumerate(family)]


@pytest.fixture(scope="module")
def servers(running_servers: tuple[RunningServer, RunningServer]) -> Servers:
    chat, pair = running_servers
    return Servers(Server(chat.url), Server(pair.url))


@pytest.mark.parametrize("case", EVERY)
def test_case_documented_as_passing_passes(servers: Servers, case: Case) -> None:
    found = run_case(case, servers)
    assert cell(case.name) in PAGE, "python -m tests.harness.conformance --write docs/conformance.md"
    assert found.verdict == PASSES or not PAGE[cell(case.name)], f"{case.name}: {found.message}"


def test_case_names_are_unique_and_equal_those_of_the_page() -> None:
    names = [cell(case.name) for family in FAMILIES for case in family]
    assert all(names) and sorted(names) == sorted(PAGE)


def test_case_outcome_is_passes_refused_or_differs(servers: Servers) -> None:
    cases = Cases("Ways to end")

    @cases.add("here")
    def _(at: Servers) -> None:
        """It is answered."""
        at.chat.json(CHAT, messages=HELLO)

    @cases.add("here", why="because")
    def _(at: Servers) -> None:
        """It is | refused."""
        at.chat.json(CHAT, messages=[])

    @cases.add("here")
    def _(at: Servers) -> None:
        """Its fields are otherwise."""
        at.chat.json(CHAT, messages=HELLO)["nonsense"]

    found = [run_case(case, servers) for case in cases]
    assert [one.verdict for one in found] == [PASSES, REFUSED, DIFFERS]
    assert "400: messages" in found[1].message and "nonsense" in found[2].message
    text = page([(cases.title, found)])
    assert passing(text) == {"It is answered": True, "It is \\| refused": False, "Its fields are otherwise": False}
    assert "because" in text and "Of 3 cases 1 pass, 1 are refused, 1 differ" in text
    assert Outcome(cases[0], PASSES).message == ""
