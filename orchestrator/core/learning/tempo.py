"""How soon a drafter's work comes, as the orchestrator sees it, and how a round's outcomes are dealt by that.

Its pace, its link and what it does for others are all in one measure: the time from a word to what it brings. Times in
milliseconds, of the orchestrator's own clock. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.orchestrator.core.learning.averages import Average

SMOOTHING = 0.3
# Who is not worth being asked is tried again after so many rounds.
TRIAL_ROUNDS = 32
# Another leads only when it is quicker by so much: the one that leads has the chain under verification in its tree.
LEADS = 0.9
# Drafters share alike that bring at least so much of what the best of them brings in time.
ALIKE = 0.75


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
        """Nothing came for so long, and as long again is to be expected."""
        if milliseconds > self.lag_ms:
            self._lag_ms.add(2 * milliseconds)

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
Models = Mapping[str, object]
"""What each drafter runs: those of one model rank alike."""


def quickest(tempos: Tempos, depth: int, lead: str = "") -> list[str]:
    """Their names, the quickest first, those that nobody knows last."""

    def expected(name: str) -> tuple[bool, float, str]:
        tempo = tempos[name]
        return not tempo.is_known, tempo.ready_ms(depth) * (LEADS if name == lead else 1.0), name

    return sorted(tempos, key=expected)


def dealt(tempos: Tempos, models: Models, lead: str, branches: int, depth: int, within_ms: float) -> dict[str, range]:
    """Which ranks each prepares, the quickest first: it has the likeliest outcomes, and leads.

    The `branches` likeliest of a model's ranking are shared by its drafters that are about as good in time as their
    best. One that brings less of the depth gets some behind those, which takes nothing from anybody; one that brings
    nothing in time gets these only when its trial is due. The quickest of all is asked however slow it is.
    """
    order = quickest(tempos, depth, lead)
    shares = {name: tempos[name].share(depth, within_ms) for name in order}
    asked = [name for name in order if shares[name] or name == order[0] or tempos[name].is_due]
    found: dict[str, range] = {}
    for model in dict.fromkeys(models[name] for name in asked):
        alike = [name for name in asked if models[name] == model]
        best = max(shares[name] for name in alike)
        good = [name for name in alike if shares[name] and shares[name] >= ALIKE * best] or alike[:1]
        width, others = max(branches // len(alike), 1), [name for name in alike if name not in good]
        found |= evenly(good, branches)
        found |= {name: range(branches + n * width, branches + (n + 1) * width) for n, name in enumerate(others)}
    return {name: found[name] for name in order if name in found}


def evenly(names: Sequence[str], branches: int) -> dict[str, range]:
    """All ranks once, in the order of the names."""
    ends = [branches * index // len(names) for index in range(len(names) + 1)]
    return {name: range(first, last) for name, first, last in zip(names, ends, ends[1:], strict=False) if last > first}
