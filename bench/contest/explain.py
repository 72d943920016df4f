"""The lines under a bench's table: what the machine costs, what that allows, and where a round's time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.contest.contest import COLOCATED, Contestant, Ours, Run
from outrider.bench.contest.summary import Judged, Summary, judge, judge_plain, summary, times_of_drafting
from outrider.bench.timing.alone import Alone

GIGA = 1e9
# A share of fewer outcomes than this says nothing.
FEWEST = 5


@dataclass(frozen=True, slots=True)
class Subject:
    """A contestant of ours; `depth` is its K, None where that changes or there is none."""

    name: str
    mode: str
    depth: int | None
    summary: Summary


def subjects_of(best: Sequence[Contestant], runs: Mapping[str, Sequence[Run]], apart: str) -> list[Subject]:
    """Those of the contestants that are ours; names that end with `apart` are of another table.

    Not the colocated: they draft in turn without asking, which is no round of the formula's.
    """
    return [
        Subject(one.name, one.mode, one.depth, summary([run.timings for run in runs[one.name] if run.timings]))
        for one in best
        if isinstance(one, Ours) and not one.name.endswith(apart) and COLOCATED not in one.name
    ]


def judge_all(subjects: Sequence[Subject], alone: Alone) -> dict[str, Judged]:
    """Measured against the formula, by name: AR, and modes that keep to one K."""
    return {s.name: _judge(s, alone) for s in subjects if s.mode == "ar" or s.depth is not None}


def _judge(subject: Subject, alone: Alone) -> Judged:
    if subject.mode == "ar":
        return judge_plain(subject.summary, alone)
    return judge(subject.summary, alone, subject.depth or 0, works_ahead=subject.mode == "ssd")


def lines(alone: Alone, subjects: Sequence[Subject], branches: int, weight_bytes: int) -> list[str]:
    """`weight_bytes` is what the target reads in one forward."""
    judged = judge_all(subjects, alone)
    depth = next((subject.depth for subject in subjects if subject.mode == "ssd"), None)
    found = [_costs(alone)]
    if depth is not None:
        found.append(_ceiling(alone, depth, branches))
    found += [_round(subject, judged[subject.name]) for subject in subjects if subject.name in judged]
    streamed = ", ".join(f"{s.name} {_streamed(s.summary, weight_bytes):.1f}" for s in subjects)
    found.append(f"- target weights read, GB/s while verifying ({weight_bytes / 1e6:.0f} MB a forward): {streamed}")
    found += [f"- accepted by position, {s.name}: {_positions(s.summary)}" for s in subjects if s.depth is not None]
    found += [
        f"- hits by accepted tokens, {s.name}: {_hits(s.summary)}" for s in subjects if sum(s.summary.looked_up) > 0
    ]
    return found


def shares(subject: Subject) -> str:
    """Where the time of this contestant's rounds went, without times measured alone."""
    found = subject.summary
    whole_ms, verify_ms, idle_ms = (total / found.rounds for total in (found.decode_ms, found.verify_ms, found.idle_ms))
    hits = "" if found.hit_rate is None else f", hits {found.hit_rate:.0%}"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {verify_ms:.2f} + target without work {idle_ms:.2f}"
        f" + rest {whole_ms - verify_ms - idle_ms:.2f}; {found.tokens / found.rounds:.2f} tokens{hits}"
    )


def _costs(alone: Alone) -> str:
    first = alone.verify_ms(1)
    rows = ", ".join(f"{rows}: {ms / first:.2f}" for rows, ms in alone.verify_ms.points)
    return (
        f"- alone: a token of plain decoding {alone.step_ms:.2f} ms; c(M), a verify of M tokens, {first:.2f} ms times"
        f" {rows}"
    )


def _ceiling(alone: Alone, depth: int, branches: int) -> str:
    ahead, chain = times_of_drafting(alone.costs(), depth)
    return (
        f"- alone, K = {depth}, B = {branches}: work ahead {alone.ahead_ms(depth):.2f} ms, T_p = {ahead:.2f};"
        f" a chain {alone.chain_ms(depth):.2f} ms, T_SD = {chain:.2f}; so SSD can gain at most {1 + chain:.2f}x on SD"
    )


def _round(subject: Subject, judged: Judged) -> str:
    whole_ms = 1000 * subject.summary.tokens / subject.summary.rounds / judged.measured
    slower = judged.verify_ms / judged.verify_alone_ms
    between = f" + between {judged.between_ms:.2f} (formula {judged.between_alone_ms:.2f})"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {judged.verify_ms:.2f} (alone"
        f" {judged.verify_alone_ms:.2f}, so {slower:.2f} times){between if judged.between_alone_ms else ''};"
        f" formula {judged.predicted:.1f} tok/s, measured {judged.measured:.1f}"
    )


def _streamed(summary: Summary, weight_bytes: int) -> float:
    return weight_bytes * summary.rounds / (summary.verify_ms / 1000) / GIGA


def _positions(summary: Summary) -> str:
    """How often chain token i and all before it held, of the chains that had one."""
    pairs = zip(summary.accepted, summary.drafted, strict=True)
    return "  ".join(f"{i}: {held / tried:.2f}" for i, (held, tried) in enumerate(pairs, 1) if tried)


def _hits(summary: Summary) -> str:
    pairs = zip(summary.hits, summary.looked_up, strict=False)
    return "  ".join(f"{k}: {hits / tried:.2f} of {tried}" for k, (hits, tried) in enumerate(pairs) if tried >= FEWEST)
