"""A conformance case: a request, its source, and the expected response. Its outcome is one of three.

*passes*: as expected. *refused*: the server answers with an error. *differs*: it answers in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.harness.conformance.http_client import Refusal, Reply, Server

PASSES, REFUSED, DIFFERS = "passes", "refused", "differs"


@dataclass(frozen=True, slots=True)
class Servers:
    """`chat` serves the scripted model, which has a template and tools; `pair` the tiny pair, which has none."""

    chat: Server
    pair: Server


CaseFunction = Callable[[Servers], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`name`: the expectation; `source`: where it is from; `why`: why it intentionally does not pass, if so."""

    name: str
    source: str
    run: CaseFunction
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`message`: the server's error message, or the difference; empty if the case passes."""

    case: Case
    verdict: str
    message: str = ""


class ExpectationFailed(Exception):
    """A response differs from the expected one; the message says how."""


class Cases(list[Case]):
    """The cases of one family with its title, in the order of the source."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def add(self, source: str, why: str = "") -> Callable[[CaseFunction], CaseFunction]:
        """Returns a decorator that adds a function as a case; its docstring is the case's name."""

        def decorate(run: CaseFunction) -> CaseFunction:
            self.append(Case((run.__doc__ or "").strip().rstrip("."), source, run, why))
            return run

        return decorate


def run_case(case: Case, servers: Servers) -> Outcome:
    """Runs a case, and returns its outcome."""
    try:
        case.run(servers)
    except Refusal as error:
        return Outcome(case, REFUSED, str(error))
    except ExpectationFailed as error:
        return Outcome(case, DIFFERS, str(error))
    except LookupError as error:
        return Outcome(case, DIFFERS, f"the answer has no {error}")
    return Outcome(case, PASSES)


def expect(condition: object, message: str) -> None:
    """Raises ExpectationFailed with `message` unless the condition is true."""
    if not condition:
        raise ExpectationFailed(message)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raises ExpectationFailed unless both are equal."""
    expect(found == expected, f"{what} is {found!r}, and not {expected!r}")


def refused(reply: Reply, *words: str, status: int = 400) -> None:
    """Checks for an error of this status whose message contains all of `words`. Raises ExpectationFailed."""
    equal(reply.status, status, "the status")
    for word in words:
        expect(word in reply.message, f"the error says {reply.message!r}, and not {word!r}")
