"""Measures heads in the target's process for `tune`, each in real rounds at several K.

Heads take turns with the target, so no step is timed in isolation. Results are added to the probe of a draft model, if
there is one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from outrider.bench.timing.loops import Curve, medians, milliseconds
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.tuning import InProcessKnown, TunedArm, Tuning
from outrider.orchestrator.pairing.model_files import in_process_drafters
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.protocol.errors import WorkerError
from outrider.protocol.heads import names_of
from outrider.protocol.messages import RoundRecord, Timings
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import each

DEPTHS = (1, 2, 4, 6)


PLAIN = Arm("ar")


@dataclass(frozen=True, slots=True)
class MeasuredHead:
    """Tokens per second of one arm (`choice`), and its drafting time per token and acceptance (`known`).

    `forwards`: rows and milliseconds of each of the target's forwards.
    """

    choice: TunedArm
    known: InProcessKnown
    forwards: tuple[tuple[int, float], ...] = ()


def measure(
    client: Client,
    arms: Sequence[Arm],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tell: Callable[[str], None],
) -> dict[Arm, MeasuredHead]:
    """Runs all arms interleaved, one text at a time."""
    runs = defaultdict[Arm, list[_Run]](list)
    for number, text in enumerate(texts, 1):
        for arm in arms:
            tell(f"{arm.drafter or 'plain decoding'}, K = {arm.depth}, text {number} of {len(texts)}")
            runs[arm].append(_run(client, arm, text, sampling))
    return {arm: _measured_head(arm, of_arm) for arm, of_arm in runs.items()}


def best_of_each(found: Mapping[Arm, MeasuredHead]) -> list[MeasuredHead]:
    """Returns each drafter at its best K, with the acceptance of its longest chains. Drafters that draft nothing are
    omitted."""
    best = []
    for drafter in dict.fromkeys(arm.drafter for arm in found if arm.drafter):
        by_depth = {arm.depth: head for arm, head in found.items() if arm.drafter == drafter}
        longest = by_depth[max(by_depth)]
        if longest.known.acceptance:
            fastest = max(by_depth.values(), key=lambda head: head.choice.tokens_per_second)
            best.append(replace(fastest, known=longest.known))
    return best


def measured_verify_ms(found: Iterable[MeasuredHead]) -> Curve:
    """Returns the target's forward time by rows."""
    samples = defaultdict[int, list[float]](list)
    for rows, ms in (forward for head in found for forward in head.forwards):
        samples[rows].append(ms)
    return medians(samples)


_Run: TypeAlias = tuple[Timings, Sequence[RoundRecord]]
"""One text with one arm."""


def _run(client: Client, arm: Arm, text: Sequence[int], sampling: SamplingParams) -> _Run:
    depth = arm.depth or None
    stream = client.stream(
        text, sampling, rounds=True, mode=arm.mode, num_draft_tokens=depth, drafter=arm.drafter, chat_template=False
    )
    rounds = [record for chunk in stream for record in chunk.rounds or ()]
    return stream.result.timings, rounds


def _measured_head(arm: Arm, runs: Sequence[_Run]) -> MeasuredHead:
    timings, rounds = [times for times, _ in runs], [record for _, of_run in runs for record in of_run]
    rate = 1000 * sum(t.predicted_n - 1 for t in timings) / sum(t.predicted_ms for t in timings)
    drafting = [part for record in rounds for part in record.drafting if part.drafter == arm.drafter and part.depth]
    step_ms = sum(milliseconds(part.work) for part in drafting) / max(sum(part.depth for part in drafting), 1)
    # The first forward of a text reads the prompt.
    forwards = tuple((record.drafted + 1, milliseconds(record.verify)) for _, of_run in runs for record in of_run[1:])
    choice = TunedArm(arm.mode, arm.depth, 0, rate, True, drafter=arm.drafter)
    return MeasuredHead(choice, InProcessKnown(arm.drafter, step_ms, _acceptance(timings)), forwards)


def _acceptance(timings: Sequence[Timings]) -> tuple[float, ...]:
    """Returns the acceptance by position: how often a chain token was accepted if all before it were."""
    held, tried = each(*(t.accepted_by_position for t in timings)), each(*(t.drafted_by_position for t in timings))
    reached = [*tried[:1], *held[:-1]]
    return tuple(h / r for h, r in zip(held, reached, strict=True) if r)


TOKENS = 64

Texts = Sequence[Sequence[int]]


def additional(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> list[MeasuredHead]:
    """Measures the heads of a pair that also has a draft worker."""
    return best_of_each(_measured(options, _arms(pair), texts, screen))


def alone(options: argparse.Namespace, pair: ChosenPair, texts: Texts, screen: Screen) -> tuple[Tuning, str]:
    """Tunes a pair that drafts only with heads. Returns the record and a description.

    Raises:
        WorkerError: no head drafts anything.
    """
    found = _measured(options, [PLAIN, *_arms(pair)], texts, screen)
    best, plain, verify_ms = best_of_each(found), found[PLAIN].choice, measured_verify_ms(found.values())
    if not best:
        raise WorkerError("no head drafts anything for this target; `outrider doctor` shows the reason")
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
    lines = [f"verify of M tokens {verify_ms(1):.2f} ms times  {rows}", "measured in real rounds:"]
    lines += [f"  ar: {plain.tokens_per_second:.1f} tok/s", *map(line, best)]
    lines.append(f"recommended: {_flags(record.choices[0])}")
    return record, "\n".join(lines)


def _flags(choice: TunedArm) -> str:
    depth = f" --num-draft-tokens {choice.depth}" if choice.depth else ""
    return f"--mode {choice.mode}{depth}"


def line(found: MeasuredHead) -> str:
    """Returns a line that describes one result."""
    choice, known = found.choice, found.known
    acceptance = ", ".join(f"{share:.0%}" for share in known.acceptance)
    return (
        f"  sd with {choice.drafter}, K={choice.depth}: {choice.tokens_per_second:.1f} tok/s;"
        f" {known.step_ms:.2f} ms per drafted token; acceptance by position {acceptance}"
    )


def with_heads(record: Tuning, found: Sequence[MeasuredHead]) -> Tuning:
    """Returns the record with these results added."""
    choices = sorted([*record.choices, *(head.choice for head in found)], key=lambda arm: -arm.tokens_per_second)
    return replace(record, choices=tuple(choices), own=tuple(head.known for head in found))


def _arms(pair: ChosenPair) -> list[Arm]:
    return [
        Arm("sd", depth, drafter=name)
        for name in names_of(kind for kind, _ in in_process_drafters(pair.settings))
        for depth in DEPTHS
    ]


def _measured(
    options: argparse.Namespace, arms: Sequence[Arm], texts: Texts, screen: Screen
) -> dict[Arm, MeasuredHead]:
    sampling = SamplingParams(max_tokens=TOKENS, temp=options.temp, seed=7, ignore_eos=True)
    chosen = {**flags.settings_of(options), "ngrams": False, "memory": False}
    with LocalCluster(progress=screen.show, **chosen) as cluster:
        return measure(cluster.client(), arms, texts, sampling, lambda step: screen.show(f"tune: {step}"))
