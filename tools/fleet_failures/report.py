"""Formats the results: a line per row, and a Markdown table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.fleet_failures.kills import KillResult

LIMIT_SECONDS = {"attached": 1.5}
"""Limits of the median wait for the next token."""


@dataclass(frozen=True, slots=True)
class FailureRow:
    """The results of killing one part; times in seconds.

    `waits`: of all readers; `whole`: until the fleet was complete again; `errors`: what readers saw, each message once;
    `limit`: of `p50`, if it has one; `trouble`: why the row ended early.
    """

    name: str
    kills: int
    texts: int
    differ: int
    p50: float
    p99: float
    worst: float
    whole: tuple[float, ...]
    broken: int
    errors: tuple[str, ...]
    waits: tuple[float, ...]
    limit: float | None
    trouble: str = ""

    @property
    def missed(self) -> bool:
        return bool(self.trouble) or self.differ > 0 or (self.limit is not None and not self.p50 <= self.limit)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.differ} of {self.texts} texts differ; next token after {self.p50:.2f} s (p50),"
            f" {self.p99:.2f} s (p99); {self.broken} errors; restored after {_list(self.whole)} s"
            f"{'; ' * bool(self.trouble)}{self.trouble}{'; MISSED' if self.missed else ''}"
        )


def make_row(name: str, kills: Sequence[KillResult], trouble: str = "") -> FailureRow:
    waits = tuple(wait for kill in kills for wait in kill.waits)
    errors = [error for kill in kills for error in kill.errors]
    p50, p99 = (float(np.percentile(waits, share)) if waits else float("nan") for share in (50, 99))
    return FailureRow(
        name=name,
        kills=len(kills),
        texts=sum(kill.texts for kill in kills),
        differ=sum(kill.differ for kill in kills),
        p50=p50,
        p99=p99,
        worst=max(waits, default=float("nan")),
        whole=tuple(kill.whole for kill in kills),
        broken=len(errors),
        errors=tuple(dict.fromkeys(errors)),
        waits=waits,
        limit=LIMIT_SECONDS.get(name),
        trouble=trouble,
    )


def table(rows: Sequence[FailureRow]) -> str:
    lines = [
        "| killed | texts that differ | next token, s p50 / p99 | errors readers saw | restored after, s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.differ} of {row.texts} | {row.p50:.2f} / {row.p99:.2f} |"
            f" {row.broken or 'none'} | {row.trouble or _list(row.whole)} |"
        )
    return "\n".join(lines)


def _list(seconds: Sequence[float]) -> str:
    return ", ".join(f"{s:.1f}" for s in seconds)
