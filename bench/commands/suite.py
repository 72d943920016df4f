"""`outrider bench --suite`: questions of every class to a chat model; our modes and other engines, one at a time.

All settings are chosen once for all classes, on prompts that count nowhere else, as somebody who runs a server has to.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.bench.commands import files
from outrider.bench.commands.files import numbers
from outrider.bench.contest import report
from outrider.bench.contest.contest import Contestant, Run, compete
from outrider.bench.contest.field import BASELINE, BOTH_CORES, field
from outrider.bench.contest.peers import Chosen, choose
from outrider.bench.contest.summary import shares, subjects_of
from outrider.bench.crowd import footprint
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import writable_folder
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.settings import check_draft_tokens
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

USUAL_PROMPTS = 6
DEPTHS = "2,3,5"
NOT_OF_A_SUITE = ("both_cores", "contended")


@dataclass(frozen=True, slots=True)
class Suite:
    """What is to be run, checked before anything starts. `classes` names the class of each prompt; `trials`: one prompt
    of each class, on which settings are chosen."""

    prompts: list[files.Tokens]
    classes: list[str]
    trials: list[files.Tokens]
    samplings: list[SamplingParams]
    depths: list[int]
    peers: Chosen


def run(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> int:
    plan, out = _plan(options, pair, samplings), writable_folder(options.out, "choose another --out")
    screen, given = Screen(), flags.settings_of(options)
    sections: list[report.Section] = []
    asked: dict[str, list[report.Found]] = {}
    raw: dict[str, Any] = {}
    with field(given, pair.settings, plan.depths, False, plan.peers, screen.show) as started:
        for sampling in plan.samplings:
            best = started.best(plan.trials, sampling, lambda said: screen.show(f"trial, {said}"))
            runs = compete(best, plan.prompts, sampling, screen.show)
            at = f"T={sampling.temp:g}"
            made = _sections(plan, sampling.temp, best, runs, pair.settings.threads)
            asked[at] = report.ratios(runs, plan.classes, pair.settings.threads)
            raw[at] = {
                name: [_plain(*one) for one in zip(plan.classes, found, strict=True)] for name, found in runs.items()
            }
            sections += made
            screen.clear()
            for section in made:
                print(report.table(section) + "\n")
            print(f"asked, {at}\n\n{report.ratio_table(asked[at])}\n", flush=True)
    taken = _footprint(pair, plan, given, screen)
    print("\n".join([*(footprint.lines(taken) if taken else []), *plan.peers.left_out]))
    title = f"outrider bench --suite: {options.max_tokens} tokens, B = {pair.settings.breadth}"
    results = {
        "sections": [asdict(found) for found in sections],
        "asked": {at: [asdict(one) for one in found] for at, found in asked.items()},
        "footprint": asdict(taken) if taken else None,
        "runs": raw,
    }
    files.write(out, "suite", title, pair.settings, results, lambda path: report.draw(sections, path, title))
    return 0


def _footprint(pair: ChosenPair, plan: Suite, given: dict[str, Any], screen: Screen) -> footprint.Footprint | None:
    """None where the model can't read prompts that long."""
    if (pair.target.context_length or footprint.LENGTH) < footprint.LENGTH:
        return None
    words = [token for prompt in plan.prompts for token in prompt]
    try:
        return footprint.measure(given, pair.settings, plan.peers, words, screen.show)
    finally:
        screen.clear()


def _plan(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> Suite:
    """
    Raises:
        InvalidRequest: there is nothing to run, or not everything that it takes.
    """
    for name in NOT_OF_A_SUITE:
        if getattr(options, name):
            raise InvalidRequest(f"{name.replace('_', '-')} is for one class of prompts; leave it or suite out")
    depths = numbers("depths", options.depths or DEPTHS, int)
    for depth in depths:
        check_draft_tokens(depth)
    peers = choose(options.peers, pair.settings, options.model, options.draft_model)
    found = files.of_classes(options, pair, ())
    count = USUAL_PROMPTS if options.prompts is None else options.prompts
    for kind, prompts in found.items():
        if not 1 <= count < len(prompts):
            raise InvalidRequest(f"prompts is {count}; the class {kind} has 1 to {len(prompts) - 1} beside the trial's")
    chosen = {kind: prompts[:count] for kind, prompts in found.items()}
    return Suite(
        files.in_turn(list(chosen.values())),
        [*chosen] * count,
        [prompts[-1] for prompts in found.values()],
        [replace(sampling, ignore_eos=False) for sampling in samplings],
        depths,
        peers,
    )


def _sections(
    plan: Suite, temp: float, best: Sequence[Contestant], runs: Mapping[str, list[Run]], threads: int
) -> list[report.Section]:
    """A table of all classes, with what each of our ways did in its rounds, and one of each class."""
    here = f"{threads} thread{'s' * (threads > 1)} per worker"
    notes = [shares(subject) for subject in subjects_of(best, runs, BOTH_CORES)]
    made = [report.section(report.ALL, temp, here, runs, BASELINE, {}, notes)]
    for kind in dict.fromkeys(plan.classes):
        of_kind = {
            name: [run for run, its in zip(found, plan.classes, strict=True) if its == kind]
            for name, found in runs.items()
        }
        made.append(report.section(kind, temp, here, of_kind, BASELINE, {}))
    return made


def _plain(kind: str, run: Run) -> dict[str, Any]:
    return {
        "class": kind,
        "tokens": run.timed.tokens,
        "seconds": run.timed.seconds,
        "timings": asdict(run.timings) if run.timings else None,
    }
