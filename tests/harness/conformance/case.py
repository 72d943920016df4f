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


Try = Callable[[Servers], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`name`: the expectation; `source`: where it is from; `why`: the reason why it is not meant to pass, if so."""

    name: str
    source: str
    run: Try
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`words`: the server's message, or the difference; empty if the case passes."""

    case: Case
    verdict: str
    words: str = ""


class Unmet(Exception):
    """An expectation is not met; the message says what was found."""


class Cases(list[Case]):
    """The cases of one family with its title, in the order of the source."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def add(self, source: str, why: str = "") -> Callable[[Try], Try]:
        """Returns a decorator that adds a function as a case; its docstring is the case's name."""

        def keep(run: Try) -> Try:
            self.append(Case((run.__doc__ or "").strip().rstrip("."), source, run, why))
            return run

        return keep


def outcome(case: Case, servers: Servers) -> Outcome:
    """Runs a case, and returns its outcome."""
    try:
        case.run(servers)
    except Refusal as refusal:
        return Outcome(case, REFUSED, str(refusal))
    except Unmet as unmet:
        return Outcome(case, DIFFERS, str(unmet))
    except LookupError as missing:
        return Outcome(case, DIFFERS, f"the answer has no {missing}")
    return Outcome(case, PASSES)


def hold(it_holds: object, otherwise: str) -> None:
    """Raises Unmet with `otherwise` unless the condition holds."""
    if not it_holds:
        raise Unmet(otherwise)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raises Unmet unless both are equal."""
    hold(found == expected, f"{what} is {found!r}, and not {expected!r}")


def refused(reply: Reply, *words: str, status: int = 400) -> None:
    """Checks for an error of this status with all of the words in its message. Raises Unmet."""
    equal(reply.status, status, "the status")
    for word in words:
        hold(word in reply.words, f"the error says {reply.words!r}, and not {word!r}")
