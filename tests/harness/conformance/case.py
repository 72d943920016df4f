"""A case: what is asked, where it is from, and what is expected there. What came of it is one of three.

*passes*: all is as expected. *refused*: the server says no, in its own words. *differs*: it answers, and otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.harness.conformance.asking import Refusal, Reply, Server

PASSES, REFUSED, DIFFERS = "passes", "refused", "differs"


@dataclass(frozen=True, slots=True)
class Servers:
    """`chat` serves the scripted model, which has a template and tools; `pair` the embedded pair, which has none."""

    chat: Server
    pair: Server


Try = Callable[[Servers], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` says what is expected, `source` where. `why`: the reason when it does not pass, and is not meant to."""

    name: str
    source: str
    run: Try
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`words`: the server's sentence, or what was otherwise; empty when it passes."""

    case: Case
    verdict: str
    words: str = ""


class Unmet(Exception):
    """What was expected does not hold; the message says what does."""


class Cases(list[Case]):
    """One family's, under its title, in the order in which they are written."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def add(self, source: str, why: str = "") -> Callable[[Try], Try]:
        """Takes a function as a case; its docstring is the name."""

        def keep(run: Try) -> Try:
            self.append(Case((run.__doc__ or "").strip().rstrip("."), source, run, why))
            return run

        return keep


def outcome(case: Case, servers: Servers) -> Outcome:
    """Asks, and tells what came of it."""
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
    """Raises Unmet."""
    if not it_holds:
        raise Unmet(otherwise)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raises Unmet."""
    hold(found == expected, f"{what} is {found!r}, and not {expected!r}")


def refused(reply: Reply, *words: str, status: int = 400) -> None:
    """An error of this status with all of the words in its sentence. Raises Unmet."""
    equal(reply.status, status, "the status")
    for word in words:
        hold(word in reply.words, f"the error says {reply.words!r}, and not {word!r}")
