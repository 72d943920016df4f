"""What each drafter could bring one request at most on this machine, against the best mode there is today, in one run.

    python -m outrider.bench.bound            # embedded pair and mtp head, T = 0.8, 12 prompts x 96 tokens: six minutes
    python -m outrider.bench.bound --quick    # two prompts: does it run?

The modes compete as in `outrider bench`, K chosen on prompts that count nowhere else. Between their runs the same
workers tell what verifies take alone and beside a drafter at work, and what drafting in the target's process takes.
Then all ways to draft go through what was said. Supposed is what no machine has: work ahead is always done, each
outcome is a hit, messages take no time. *Counted*: a draft worker works beside each verify as SSD's does, for 16
outcomes. *With its misses and gaps*: the same over the draft model in its worker, of which the same is supposed, so
that whoever drafts loses as much to misses and between rounds as today's best. *Least*: the worker knows the outcome
and grows that branch only; no drafter beside the target can do less. *Free*: nobody works beside it and no drafting
takes time. *Foreseeing*: a head in the draft worker is supposed to have read rows that it can't have yet. Intervals
are by drawing texts again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.bench.bound.report import Row, modes_lines, pooled, table, times_lines, verdict
from outrider.bench.bound.texts import Reader
from outrider.bench.bound.times import ALL, ALONE, ONE, Times, drafting_times, verify_times
from outrider.bench.bound.ways import FORMS, Seating, best, seatings, through, ways_of
from outrider.bench.contest.contest import Run, compete
from outrider.bench.contest.field import BASELINE, field
from outrider.bench.contest.statistics import Timed, total_rate
from outrider.bench.embedded import mixed_tokens
from outrider.bench.timing.workbench import workbench
from outrider.bench.tree_rounds import DEPTH, Text
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.model_files import EMBEDDED_HEADS
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.sampling import SamplingParams

TRIALS, DRAFTED_TOKENS = 4, 32
CHAINS = (2, 3, 4)  # K of the modes


@dataclass(frozen=True, slots=True)
class Contest:
    """By mode what it made of each prompt; what the target said, texts that teach first; what was measured between."""

    runs: Mapping[str, Sequence[Run]]
    said: Sequence[tuple[int, ...]]
    times: Sequence[Times]

    @property
    def timed(self) -> dict[str, list[Timed]]:
        return {name: [run.timed for run in runs] for name, runs in self.runs.items()}


def contest(
    options: argparse.Namespace, prompts: Sequence[Sequence[int]], head: str, tell: Callable[[str], None]
) -> Contest:
    settings, sampling = choose_pair(ServeSettings()).settings, sampling_of(options)
    brief = replace(sampling, max_tokens=DRAFTED_TOKENS)
    times: list[Times] = []
    with (
        field({}, settings, CHAINS[1:2] if options.quick else CHAINS, False, False, tell) as modes,
        LocalCluster(progress=tell, colocate=True, head=options.head, ngrams=False, memory=False) as in_target,
        workbench(settings, tell) as bench,
    ):

        def between(prompt: Sequence[int], chosen: SamplingParams) -> None:
            drafting = drafting_times(in_target.client(), (DRAFT_MODEL, head), prompt, replace(brief, seed=chosen.seed))
            times.append(Times(verify_times(bench, prompt, chosen), drafting))

        trials = prompts[: options.trials]
        chosen = modes.best(trials, sampling, tell)
        plain = next(way for way in chosen if way.name == BASELINE)
        taught = compete([plain], trials, sampling, tell)[BASELINE]
        runs = compete(chosen, prompts[options.trials :], sampling, tell, between)
    return Contest(runs, [run.tokens for run in (*taught, *runs[BASELINE])], times)


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temp=options.temp, max_tokens=options.tokens, ignore_eos=True)


def read(
    options: argparse.Namespace, prompts: Sequence[Sequence[int]], said: Sequence[tuple[int, ...]], reader: Reader
) -> list[Text]:
    """The texts with all drafters' words. Seeds are those of `compete`, which counts from 0 each time."""
    seeds = [*range(options.trials), *range(options.prompts)]
    pairs = zip(prompts, said, seeds, strict=True)
    return [reader.read(prompt, rest, replace(sampling_of(options), seed=seed)) for prompt, rest, seed in pairs]


def rows(seating: Seating, texts: Sequence[Text], times: Sequence[Times], trials: int) -> Iterator[Row]:
    """Its forms, each at its best in each case."""
    cost = pooled(times, ALL if seating.has_worker else ALONE)
    for form in FORMS:
        found = through(texts, ways_of(seating, form, cost), trials)
        beside = (ALL, ONE) if seating.has_worker else (ALONE, ALONE)
        counted, least = (best(found, times, branches, seating.own) for branches in beside)
        name, free = f"{seating.name}, {form.name}", best(found, times, ALONE, ())
        yield Row(name, seating.foreseeing, counted, least, free)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", default=str(EMBEDDED_HEADS / "mtp"))
    parser.add_argument(
        "--prompts", type=int, default=12, help="prompts, all classes in turn, behind those of the trial"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each text")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--quick", action="store_true", help="two prompts, one K: does it run?")


def run(options: argparse.Namespace) -> int:
    values.whole("tokens", options.tokens, 2 * DEPTH, 512)
    options.trials = 1 if options.quick else TRIALS
    options.prompts = 2 if options.quick else values.whole("prompts", options.prompts, 2, 60)
    screen = Screen()
    prompts = mixed_tokens(options.trials + options.prompts)
    reader = Reader(options.head)
    found = contest(options, prompts, reader.name, screen.show)
    screen.clear()
    modes = found.timed
    plain, today = modes[BASELINE], max(modes.values(), key=total_rate)
    print("\n".join([*times_lines(found.times), *modes_lines(modes, BASELINE), ""]), flush=True)
    screen.show("reading what was said")
    texts = read(options, prompts, found.said, reader)
    all_rows: list[Row] = []
    for seating in seatings(reader.name):
        screen.show(f"all ways of {seating.name}")
        all_rows += rows(seating, texts, found.times, options.trials)
    screen.clear()
    print("\n".join([table(all_rows, plain, today), "", *verdict(all_rows, today)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
