"""The part of `tune` that is about heads in the target's process: measured in real rounds, each at several K.

Beside a draft model they are added to what was probed of that. In its place they are all there is to tune.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from outrider.bench.timing import heads
from outrider.bench.timing.heads import DEPTHS, PLAIN, Found, Way
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.learning.tuning import Choice, Tuning
from outrider.orchestrator.pair.heads import own_drafters
from outrider.orchestrator.pair.pairing import ChosenPair
from outrider.protocol.errors import WorkerError
from outrider.protocol.heads import names_of
from outrider.protocol.sampling import SamplingParams

TOKENS = 64

Texts = Sequence[Sequence[int]]


def beside(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> list[Found]:
    """The best of each that drafts beside a draft worker."""
    return heads.best_of_each(_measured(options, _ways(pair), texts, screen))


def alone(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> tuple[Tuning, str]:
    """What is to be kept of a pair that drafts by heads alone, and the words for it.

    Raises:
        WorkerError: none of them says anything.
    """
    found = _measured(options, [PLAIN, *_ways(pair)], texts, screen)
    best, plain, verify_ms = heads.best_of_each(found), found[PLAIN].choice, heads.verify_ms(found.values())
    if not best:
        raise WorkerError("no head drafts anything for this target; `outrider doctor` tells what is wrong with it")
    known = best[0].known
    record = Tuning(
        step_ms=1000 / plain.tokens_per_second,
        verify_ms=verify_ms.points,
        depth_ms=known.step_ms,
        draft_ms=known.step_ms,
        link_ms=0.0,
        turnaround_ms=0.0,
        acceptance=known.acceptance,
        hit_rate=0.0,
        choices=(plain,),
        temp=options.temp,
    )
    record = with_heads(record, best)
    rows = "  ".join(f"{rows}: {ms / verify_ms(1):.2f}" for rows, ms in verify_ms.points)
    words = [f"verify of M tokens {verify_ms(1):.2f} ms times  {rows}", "measured in real rounds:"]
    words += [f"  ar: {plain.tokens_per_second:.1f} tok/s", *map(line, best)]
    words.append(f"recommended: {_flags(record.choices[0])}")
    return record, "\n".join(words)


def _flags(choice: Choice) -> str:
    depth = f" --num-draft-tokens {choice.depth}" if choice.depth else ""
    return f"--mode {choice.mode}{depth}"


def line(found: Found) -> str:
    """What was found of one."""
    choice, known = found.choice, found.known
    holds = ", ".join(f"{share:.0%}" for share in known.acceptance)
    return (
        f"  sd by {choice.drafter}, K={choice.depth}: {choice.tokens_per_second:.1f} tok/s;"
        f" {known.step_ms:.2f} ms a token drafted; of those reached there held {holds}"
    )


def with_heads(record: Tuning, found: Sequence[Found]) -> Tuning:
    """The same with what was measured of them."""
    choices = sorted([*record.choices, *(one.choice for one in found)], key=lambda one: -one.tokens_per_second)
    return replace(record, choices=tuple(choices), own=tuple(one.known for one in found))


def _ways(pair: ChosenPair) -> list[Way]:
    return [Way(name, depth) for name in names_of(kind for kind, _ in own_drafters(pair.settings)) for depth in DEPTHS]


def _measured(options: argparse.Namespace, ways: Sequence[Way], texts: Texts, screen: Screen) -> dict[Way, Found]:
    sampling = SamplingParams(max_tokens=TOKENS, temp=options.temp, seed=7, ignore_eos=True)
    chosen = {**flags.settings_of(options), "ngrams": False, "memory": False}
    with LocalCluster(progress=screen.show, **chosen) as cluster:
        return heads.measure(cluster.client(), ways, texts, sampling, lambda said: screen.show(f"tune: {said}"))
