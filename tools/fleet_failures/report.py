"""What the blows showed, for people: a line a row, and a table of all in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.fleet_failures.rows import Struck
from tools.fleet_failures.victims import PROXY

ASKED_SECONDS = {"attached": 1.5}
"""To the next token, in the middle."""


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Seconds. `waits` are all readers'; `errors` what they saw, each sentence once; `asked` of `p50`, if it is.

    `trouble`: why there is not more.
    """

    name: str
    blows: int
    texts: int
    differ: int
    p50: float
    p99: float
    worst: float
    whole: tuple[float, ...]
    broken: int
    errors: tuple[str, ...]
    waits: tuple[float, ...]
    asked: float | None
    trouble: str = ""

    @property
    def missed(self) -> bool:
        return bool(self.trouble) or self.differ > 0 or (self.asked is not None and not self.p50 <= self.asked)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.differ} of {self.texts} texts differ; next token after {self.p50:.2f} s (p50),"
            f" {self.p99:.2f} s (p99); {self.broken} errors; whole again after {_list(self.whole)}"
            f"{'; ' * bool(self.trouble)}{self.trouble}{'; MISSED' if self.missed else ''}"
        )


def row(name: str, blows: Sequence[Struck], trouble: str = "") -> FailureRow:
    waits = tuple(wait for blow in blows for wait in blow.waits)
    errors = [error for blow in blows for error in blow.errors]
    p50, p99 = (float(np.percentile(waits, share)) if waits else float("nan") for share in (50, 99))
    return FailureRow(
        name=name,
        blows=len(blows),
        texts=sum(blow.texts for blow in blows),
        differ=sum(blow.differ for blow in blows),
        p50=p50,
        p99=p99,
        worst=max(waits, default=float("nan")),
        whole=tuple(blow.whole for blow in blows),
        broken=len(errors),
        errors=tuple(dict.fromkeys(errors)),
        waits=waits,
        asked=ASKED_SECONDS.get(name),
        trouble=trouble,
    )


def table(rows: Sequence[FailureRow], proxy: bool) -> str:
    lines = [
        "| killed | texts that differ | next token, s p50 / p99 | errors readers saw | whole again, s |",
        "|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| {one.name} | {one.differ} of {one.texts} | {one.p50:.2f} / {one.p99:.2f} |"
            f" {one.broken or 'none'} | {one.trouble or _list(one.whole)} |"
        )
    if proxy:
        lines.append(f"| {PROXY} | | | there is none: each gate serves HTTP itself | |")
    return "\n".join(lines)


def _list(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds)
