"""How soon a drafter's work comes, as the orchestrator sees it, and how a round's outcomes are dealt by that.

Its pace, its link and what it does for others are all in one measure: the time from a word to what it brings. Times in
milliseconds, of the orchestrator's own clock. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.orchestrator.core.averages import Average

SMOOTHING = 0.3
# Who is not worth being asked is tried again after so many rounds.
TRIAL_ROUNDS = 32
# Another leads only when it is quicker by so much: the one that leads has the chain under verification in its tree.
LEADS = 0.9


class Tempo:
    """One drafter's. `left_out`: rounds since it was last asked."""

    def __init__(self) -> None:
        self.left_out = 0
        self._lag_ms = Average(SMOOTHING)
        self._step_ms = Average(SMOOTHING)

    @property
    def is_known(self) -> bool:
        return self._lag_ms.value is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried, though it is not worth being asked, or nobody knows."""
        return not self.is_known or self.left_out >= TRIAL_ROUNDS

    @property
    def lag_ms(self) -> float:
        """From a word to the first tokens; 0: not known."""
        return self._lag_ms.value or 0.0

    @property
    def step_ms(self) -> float:
        """One token more; 0: not known."""
        return self._step_ms.value or 0.0

    def began(self, milliseconds: float) -> None:
        """The first tokens came after so long."""
        self._lag_ms.add(milliseconds)

    def grew(self, milliseconds: float) -> None:
        """The next ones came after so long."""
        self._step_ms.add(milliseconds)

    def drafted(self, tokens: int, milliseconds: float) -> None:
        """A chain came at once."""
        step = self.step_ms or milliseconds / max(tokens, 1)
        self._step_ms.add(step)
        self._lag_ms.add(max(milliseconds - (tokens - 1) * step, step))

    def overdue(self, milliseconds: float) -> None:
        """Nothing came for so long."""
        if self.is_known and milliseconds > self.lag_ms:
            self._lag_ms.add(milliseconds)

    def tried_again(self) -> None:
        """After a time in which it was left out: what was known is old."""
        self.left_out = 0
        self._lag_ms = Average(SMOOTHING)

    def ready_ms(self, depth: int) -> float:
        """From a word until what was asked for is `depth` deep."""
        return self.lag_ms + (depth - 1) * self.step_ms

    def share(self, depth: int, within_ms: float) -> float:
        """How much of the depth is there in time, from 0, nothing, to 1."""
        left_ms = within_ms - self.lag_ms
        if left_ms < 0 or not self.is_known:
            return 0.0
        if left_ms >= (depth - 1) * self.step_ms:
            return 1.0
        return (1.0 + left_ms / self.step_ms) / depth


Tempos = Mapping[str, Tempo]


def quickest(tempos: Tempos, depth: int, lead: str = "") -> list[str]:
    """Their names, the quickest first, those that nobody knows last."""

    def expected(name: str) -> tuple[bool, float, str]:
        tempo = tempos[name]
        return not tempo.is_known, tempo.ready_ms(depth) * (LEADS if name == lead else 1.0), name

    return sorted(tempos, key=expected)


def dealt(tempos: Tempos, lead: str, branches: int, depth: int, within_ms: float) -> dict[str, range]:
    """Which of the `branches` likeliest outcomes each prepares, the quickest first: it has the likeliest, and leads.

    Each gets as much as it brings in time, so that who is too slow gets nothing, and is only tried now and then, on
    outcomes behind all others': a trial takes nothing from anybody. The quickest is asked however slow it is.
    """
    order = quickest(tempos, depth, lead)
    shares = [tempos[name].share(depth, within_ms) for name in order]
    if not any(shares):
        shares[0] = 1.0
    found, given, part = {}, 0, 0.0
    for name, share in zip(order, shares, strict=True):
        part += share
        until = round(branches * part / sum(shares))
        if until > given:
            found[name] = range(given, until)
        given = until
    return found | _trials(tempos, found, branches)


def evenly(names: list[str], branches: int) -> dict[str, range]:
    """The same without a look at how quick they are."""
    ends = [branches * index // len(names) for index in range(len(names) + 1)]
    return {name: range(first, last) for name, first, last in zip(names, ends, ends[1:], strict=False) if last > first}


def _trials(tempos: Tempos, asked: Mapping[str, range], branches: int) -> dict[str, range]:
    width = max(branches // len(tempos), 1)
    due = [name for name, tempo in tempos.items() if name not in asked and tempo.is_due]
    return {name: range(branches + n * width, branches + (n + 1) * width) for n, name in enumerate(due)}
