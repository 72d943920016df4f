"""What is asked of a suite in one number each: our modes against each other and against other engines, by class.

Knows runs and names of contestants; each ratio is over the prompts of one run, in turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.contest.contest import Run
from outrider.bench.contest.peers import LLAMA_CPP, MLX_LM
from outrider.bench.contest.statistics import Interval, ratio, total_rate

ALL = "all"


@dataclass(frozen=True, slots=True)
class Asked:
    """`name` of the ratio, the contestants whose best is on either side, and the threads of theirs, if that counts."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One ratio in one class: `against` is the contestant that was the best of theirs."""

    name: str
    kind: str
    against: str
    value: Interval


def questions(threads: int) -> tuple[Asked, ...]:
    """`threads`: of each of our workers."""
    return (
        Asked(f"ar over {LLAMA_CPP}, as many threads", ("ar",), (LLAMA_CPP,), threads),
        Asked("ssd over ar", ("ssd",), ("ar",)),
        Asked("ssd over the best sd", ("ssd",), ("sd",)),
        Asked("auto over the best mode", ("auto",), ("ar", "sd", "ssd")),
        Asked(f"auto over the best of {LLAMA_CPP}, both cores", ("auto",), (LLAMA_CPP,), 2 * threads),
        Asked(f"auto over the best of {MLX_LM}", ("auto",), (MLX_LM,)),
    )


def ratios(runs: Mapping[str, Sequence[Run]], classes: Sequence[str], threads: int) -> list[Found]:
    """Every question that has contestants on both sides, for all classes together and for each; `classes` names the
    class of each prompt, in the order of the runs."""
    found = []
    for asked in questions(threads):
        for kind in (ALL, *dict.fromkeys(classes)):
            of_kind = {
                name: [run.timed for run, its in zip(made, classes, strict=True) if kind in (ALL, its)]
                for name, made in runs.items()
            }
            rates = {name: total_rate(timed) for name, timed in of_kind.items()}
            ours = [name for name in runs if _is_one_of(name, asked.ours, None)]
            theirs = [name for name in runs if _is_one_of(name, asked.theirs, asked.threads)]
            if ours and theirs:
                best, against = (max(names, key=rates.__getitem__) for names in (ours, theirs))
                found.append(Found(asked.name, kind, against, ratio(of_kind[best], of_kind[against])))
    return found


def table(found: Sequence[Found]) -> str:
    """A Markdown table: a line for each ratio, a column for each class, and what all classes were held against."""
    kinds = list(dict.fromkeys(one.kind for one in found))
    lines = [f"| | {' | '.join(kinds)} | held against |", "|---" * (len(kinds) + 2) + "|"]
    for name in dict.fromkeys(one.name for one in found):
        of_name = {one.kind: one for one in found if one.name == name}
        cells = [str(of_name[ALL].value), *(f"{of_name[kind].value.value:.2f}" for kind in kinds if kind != ALL)]
        lines.append(f"| {name} | {' | '.join(cells)} | {of_name[ALL].against} |")
    return "\n".join(lines)


def _is_one_of(name: str, families: Sequence[str], threads: int | None) -> bool:
    """A family is the first word of a name: "sd" is "sd n-gram K=3" and not "ssd K=3"; a peer's draft is its own."""
    if threads is not None and not name.endswith(f", {threads} thread{'s' * (threads > 1)}"):
        return False
    return any(name == family or name.startswith((f"{family} ", f"{family},")) for family in families)
