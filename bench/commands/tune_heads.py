"""The part of `tune` that measures heads in the target's process, each in real rounds at several K.

Heads take turns with the target, so there is nothing to time separately. Results are added to the probe of a draft
model, if there is one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from outrider.bench.timing.loops import Curve, medians, milliseconds
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.client.dialogue import GenerateFields
from outrider.orchestrator.core.policy.tuning import InProcessKnown, TunedArm, Tuning
from outrider.orchestrator.pairing.model_files import in_process_drafters
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.protocol.errors import WorkerError
from outrider.protocol.heads import names_of
from outrider.protocol.messages import RoundRecord, Timings
from outrider.protocol.sampling import SamplingParams

DEPTHS = (2, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class HeadArm:
    """A drafter with chains of `depth`; empty for plain decoding."""

    drafter: str = ""
    depth: int = 0


PLAIN = HeadArm()


@dataclass(frozen=True, slots=True)
class MeasuredHead:
    """Tokens per second of one arm, and its drafting time per token and acceptance.

    `forwards`: rows and milliseconds of the target's forwards.
    """

    choice: TunedArm
    known: InProcessKnown
    forwards: tuple[tuple[int, float], ...] = ()


def measure(
    client: Client,
    ways: Sequence[HeadArm],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tell: Callable[[str], None],
) -> dict[HeadArm, MeasuredHead]:
    """Runs all arms interleaved, one text at a time."""
    runs = defaultdict[HeadArm, list[_Run]](list)
    for number, text in enumerate(texts, 1):
        for way in ways:
            tell(f"{way.drafter or 'plain decoding'}, K = {way.depth}, text {number} of {len(texts)}")
            runs[way].append(_run(client, way, text, sampling))
    return {way: _found(way, own) for way, own in runs.items()}


def best_of_each(found: Mapping[HeadArm, MeasuredHead]) -> list[MeasuredHead]:
    """Returns each drafter's best K, with the acceptance of its longest chains. Drafters that draft nothing are
    omitted."""
    best = []
    for drafter in dict.fromkeys(way.drafter for way in found if way.drafter):
        own = {way.depth: one for way, one in found.items() if way.drafter == drafter}
        longest = own[max(own)]
        if longest.known.acceptance:
            quickest = max(own.values(), key=lambda one: one.choice.tokens_per_second)
            best.append(replace(quickest, known=longest.known))
    return best


def measured_verify_ms(found: Iterable[MeasuredHead]) -> Curve:
    """Returns the target's forward time by rows."""
    samples = defaultdict[int, list[float]](list)
    for rows, ms in (forward for one in found for forward in one.forwards):
        samples[rows].append(ms)
    return medians(samples)


@dataclass(frozen=True, slots=True)
class _Run:
    """One text with one arm."""

    timings: Timings
    rounds: Sequence[RoundRecord]


def _run(client: Client, way: HeadArm, text: Sequence[int], sampling: SamplingParams) -> _Run:
    wishes: GenerateFields = {"mode": "ar", "chat_template": False}
    if way.drafter:
        wishes |= {"mode": "sd", "num_draft_tokens": way.depth, "drafter": way.drafter}
    stream = client.stream(text, sampling, rounds=True, **wishes)
    rounds = [record for chunk in stream for record in chunk.rounds or ()]
    return _Run(stream.result.timings, rounds)


def _found(way: HeadArm, runs: Sequence[_Run]) -> MeasuredHead:
    timings, rounds = [run.timings for run in runs], [record for run in runs for record in run.rounds]
    rate = 1000 * sum(one.predicted_n - 1 for one in timings) / sum(one.predicted_ms for one in timings)
    drafting = [one for record in rounds for one in record.drafting if one.drafter == way.drafter and one.depth]
    step_ms = sum(milliseconds(one.work) for one in drafting) / max(sum(one.depth for one in drafting), 1)
    # A text's first forward reads the prompt.
    forwards = tuple((one.drafted + 1, milliseconds(one.verify)) for run in runs for one in run.rounds[1:])
    choice = TunedArm("sd" if way.drafter else "ar", way.depth, 0, rate, True, drafter=way.drafter)
    return MeasuredHead(choice, InProcessKnown(way.drafter, step_ms, _acceptance(timings)), forwards)


def _acceptance(timings: Sequence[Timings]) -> tuple[float, ...]:
    """Returns how often each chain token held, given that those before it did."""
    held = _sums([one.accepted_by_position for one in timings])
    tried = _sums([one.drafted_by_position for one in timings])
    reached = [*tried[:1], *held[:-1]]
    return tuple(h / r for h, r in zip(held, reached, strict=True) if r)


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


TOKENS = 64

Texts = Sequence[Sequence[int]]


def beside(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> list[MeasuredHead]:
    """Measures heads beside a draft worker."""
    return best_of_each(_measured(options, _ways(pair), texts, screen))


def alone(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> tuple[Tuning, str]:
    """Tunes a pair that drafts only with heads. Returns the record and a description.

    Raises:
        WorkerError: no head drafts anything.
    """
    found = _measured(options, [PLAIN, *_ways(pair)], texts, screen)
    best, plain, verify_ms = best_of_each(found), found[PLAIN].choice, measured_verify_ms(found.values())
    if not best:
        raise WorkerError("no head drafts anything for this target; `outrider doctor` shows what is wrong with it")
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


def _flags(choice: TunedArm) -> str:
    depth = f" --num-draft-tokens {choice.depth}" if choice.depth else ""
    return f"--mode {choice.mode}{depth}"


def line(found: MeasuredHead) -> str:
    """Describes one result."""
    choice, known = found.choice, found.known
    holds = ", ".join(f"{share:.0%}" for share in known.acceptance)
    return (
        f"  sd by {choice.drafter}, K={choice.depth}: {choice.tokens_per_second:.1f} tok/s;"
        f" {known.step_ms:.2f} ms a token drafted; of those reached there held {holds}"
    )


def with_heads(record: Tuning, found: Sequence[MeasuredHead]) -> Tuning:
    """Adds the results to a record."""
    choices = sorted([*record.choices, *(one.choice for one in found)], key=lambda one: -one.tokens_per_second)
    return replace(record, choices=tuple(choices), own=tuple(one.known for one in found))


def _ways(pair: ChosenPair) -> list[HeadArm]:
    return [
        HeadArm(name, depth)
        for name in names_of(kind for kind, _ in in_process_drafters(pair.settings))
        for depth in DEPTHS
    ]


def _measured(
    options: argparse.Namespace, ways: Sequence[HeadArm], texts: Texts, screen: Screen
) -> dict[HeadArm, MeasuredHead]:
    sampling = SamplingParams(max_tokens=TOKENS, temp=options.temp, seed=7, ignore_eos=True)
    chosen = {**flags.settings_of(options), "ngrams": False, "memory": False}
    with LocalCluster(progress=screen.show, **chosen) as cluster:
        return measure(cluster.client(), ways, texts, sampling, lambda step: screen.show(f"tune: {step}"))
