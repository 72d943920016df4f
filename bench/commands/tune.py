"""Probes this machine with this pair for about a minute and says what pays: AR, SD or SSD, with which K and B."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from outrider.bench.contest.contest import Ours, compete
from outrider.bench.contest.statistics import total_rate
from outrider.bench.timing import heads
from outrider.bench.timing.forecast import (
    Forecast,
    best_of,
    costs_in_turn,
    forecasts,
    most_gained,
    recommendation,
)
from outrider.bench.timing.prefill import PrefillTimes, measure
from outrider.bench.timing.probe import Probe, may_pay, probe
from outrider.bench.timing.workbench import workbench
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.folder import writable
from outrider.orchestrator.cli.screen import Screen, say
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core import tuning
from outrider.orchestrator.core.tuning import Choice, Tuning
from outrider.orchestrator.machine import prompt_reader
from outrider.orchestrator.pair.heads import own_drafters
from outrider.orchestrator.pair.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pair.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.heads import names_of
from outrider.protocol.sampling import SamplingParams

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef load_settings(path):\n",
    "# Sorts a list of numbers.\ndef quicksort(values):\n",
)
DEPTHS = (2, 3, 4, 6)
BRANCHES = (4, 8, 16)
TURNAROUND_TOKENS = 64
# Without a measurement: a message there and one back.
USUAL_TURNAROUND_MS = 0.3
# Where a model's configuration does not say them.
USUAL_CONTEXT, USUAL_VOCABULARY = 2048, 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help="to probe at, default 0")
    parser.add_argument("--measure", action="store_true", help="also run each mode and print it beside its forecast")
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    settings = ServeSettings(**flags.settings_of(options))
    sampling = SamplingParams(max_tokens=1 << 20, temp=options.temp, seed=7, ignore_eos=True)
    pair = choose_pair(settings)
    if pair.settings.drafts_by_head:
        raise InvalidRequest(
            f"tune can't take {pair.settings.draft_backend} heads apart, which draft by what the target has just read;"
            " expected --head PATH beside a draft model, which tune measures in real rounds, or auto, which learns"
        )
    if settings.colocate:
        raise InvalidRequest("tune probes a drafter that works beside the target; leave colocate out")
    if not pair.settings.has_draft_worker:
        raise InvalidRequest(f"tune probes a draft model; expected another backend than {pair.settings.draft_backend}")
    where = tuning.path_for(pair.settings)
    writable(where.parent, "set XDG_CACHE_HOME to a folder that can be")
    screen = Screen()
    try:
        turnaround_ms = _turnaround(options, screen)
        measured = _probe(pair, sampling, screen)
    except KeyboardInterrupt:
        screen.clear()
        say("outrider tune: interrupted; nothing was saved")
        raise
    reading = prompt_reader.measured(str(pair.settings.draft_model)) if settings.draft_backend == "mlx" else None
    prefill = _prefill(options, pair, screen) if settings.prefill_workers else None
    own = _own(options, pair, screen) if pair.settings.head else []
    screen.clear()
    found = forecasts(measured, turnaround_ms)
    print(_costs(measured, turnaround_ms))
    if reading is not None:
        print(reading)
    if prefill is not None:
        print(prefill.sentence)
    print(_verdict(measured, found))
    for one in own:
        print(_head(one))
    if options.measure:
        print(_compare(options, pair, found, screen))
    record = _with(_record(measured, turnaround_ms, found, options.temp), own)
    tuning.save(record if prefill is None else replace(record, prefill_from=prefill.least), where)
    print(f"saved for --mode auto at {'T = 0' if options.temp == 0 else 'any T above 0'}: {where}")
    return 0


def _probe(pair: ChosenPair, sampling: SamplingParams, screen: Screen) -> Probe:
    codec = load_codec(pair.target)
    with workbench(pair.settings, screen.show) as bench:
        return probe(bench, [codec.encode(text) for text in PROMPTS], sampling, DEPTHS, BRANCHES, screen.show)


def _turnaround(options: argparse.Namespace, screen: Screen) -> float:
    """The mean turnaround of real hits: most cost no message, the others a whole one."""
    with LocalCluster(progress=screen.show, **flags.settings_of(options)) as cluster:
        screen.show("tune: turnaround")
        sampling = SamplingParams(max_tokens=TURNAROUND_TOKENS, ignore_eos=True)
        timings = cluster.client().generate(PROMPTS[0], sampling, mode="ssd").timings
    return statistics.fmean(timings.turnaround_ms) if timings.turnaround_ms else USUAL_TURNAROUND_MS


def _prefill(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> PrefillTimes:
    context, vocabulary = pair.target.context_length, pair.target.vocab_size
    return measure(flags.settings_of(options), context or USUAL_CONTEXT, vocabulary or USUAL_VOCABULARY, screen.show)


def _own(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> list[heads.Found]:
    """Heads, in real rounds: they take turns with the target, so there is nothing to be told apart."""
    codec, names = load_codec(pair.target), names_of(kind for kind, _ in own_drafters(pair.settings))
    texts = [codec.encode(text) for text in PROMPTS]
    sampling = SamplingParams(max_tokens=TURNAROUND_TOKENS, temp=options.temp, seed=7, ignore_eos=True)
    with LocalCluster(progress=screen.show, **{**flags.settings_of(options), "ngrams": False}) as cluster:
        found = heads.measure(
            cluster.client(), names, texts, sampling, DEPTHS, lambda said: screen.show(f"tune: {said}")
        )
        return list(found)


def _head(found: heads.Found) -> str:
    choice, known = found.choice, found.known
    holds = ", ".join(f"{share:.0%}" for share in known.acceptance)
    return (
        f"  sd by {choice.drafter}, K={choice.depth}: {choice.tokens_per_second:.1f} tok/s measured;"
        f" {known.step_ms:.2f} ms a token drafted; of those reached there held {holds}"
    )


def _with(record: Tuning, own: Sequence[heads.Found]) -> Tuning:
    """The same with what was measured of heads."""
    choices = sorted([*record.choices, *(one.choice for one in own)], key=lambda one: -one.tokens_per_second)
    return replace(record, choices=tuple(choices), own=tuple(one.known for one in own))


def _costs(p: Probe, turnaround_ms: float) -> str:
    rows = "  ".join(f"{rows}: {ms / p.verify_ms(1):.2f}" for rows, ms in p.verify_ms.points)
    return "\n".join(
        [
            f"one token of plain decoding  {p.step_ms:.2f} ms",
            f"verify of M tokens, alone    {p.verify_ms(1):.2f} ms times  {rows}",
            f"a chain right after another  {_points(p.chain_ms.points)} ms by length; link {p.link_ms:.2f} ms",
            f"a chain after a verify       {_points(_in_turn(p))} ms by length, link included",
            f"a depth of all branches      {_points(p.tree_ms.points)} ms by branches",
            f"turnaround of a hit          {turnaround_ms:.2f} ms",
        ]
    )


def _in_turn(p: Probe) -> list[tuple[int, float]]:
    return [(depth, costs_in_turn(p).chain_ms(depth)) for depth, _ in p.turn_ms.points]


def _points(points: Sequence[tuple[int, float]]) -> str:
    return "  ".join(f"{at}: {ms:.2f}" for at, ms in points)


def _verdict(measured: Probe, found: list[Forecast]) -> str:
    chosen = recommendation(found)
    lines = ["", "forecast (ar, sd: times measured alone, in turn; ssd: the verify as it is beside the drafter):"]
    for best in _bests(found):
        lines.append(f"  {best.mode:4} {_settings(best):14} {best.tokens_per_second:7.1f} tok/s   {best.limit}")
    if chosen.mode == "ar":
        lines.append(f"speculation does not help here: {_why_not(measured, found)}. Recommended: --mode ar")
    else:
        depth = chosen.depth
        lines.append(f"the most SSD can gain over SD at K = {depth}: {most_gained(measured, depth):.2f}x")
        lines.append(f"recommended: --mode {chosen.mode} {_flags(chosen)}")
    return "\n".join(lines)


def _why_not(measured: Probe, found: list[Forecast]) -> str:
    tried = measured.rehearsals[0]
    if len(measured.rehearsals) == 1 and not may_pay(tried, measured.step_ms, measured.verify_ms):
        brings = f"{tried.tokens_in_full:.2f} tokens a round at K = {tried.depth}"
        return f"{brings} would not pay for the verify even if drafting took no time, so no other K and B were tried"
    best = next(forecast for forecast in found if forecast.mode != "ar")
    return f"{best.mode} would bring {best.tokens_per_second:.1f} tok/s, {best.limit}"


def _settings(forecast: Forecast) -> str:
    return {"ar": "", "sd": f"K={forecast.depth}"}.get(forecast.mode, f"K={forecast.depth} B={forecast.branches}")


def _flags(forecast: Forecast) -> str:
    branches = f" --branches {forecast.branches}" if forecast.branches else ""
    return f"--num-draft-tokens {forecast.depth}{branches}"


def _compare(options: argparse.Namespace, pair: ChosenPair, found: list[Forecast], screen: Screen) -> str:
    """Each mode at its forecast settings, really run, in turns; without n-grams as the forecast knows none."""
    codec, lines = load_codec(pair.target), ["", "forecast against measured, tok/s:"]
    sampling = SamplingParams(max_tokens=160, temp=options.temp, ignore_eos=True)
    with LocalCluster(progress=screen.show, **{**flags.settings_of(options), "ngrams": False}) as cluster:
        ways = [
            Ours(best.mode, cluster.client(), best.mode, best.depth or None, best.branches or None)
            for best in _bests(found)
        ]
        runs = compete(
            ways, [codec.encode(text) for text in PROMPTS], sampling, lambda said: screen.show(f"tune: {said}")
        )
    screen.clear()
    for best in _bests(found):
        rate = total_rate([run.timed for run in runs[best.mode]])
        ratio = best.tokens_per_second / rate
        lines.append(f"  {best.mode:4} {best.tokens_per_second:7.1f} against {rate:7.1f}   {ratio:.2f}")
    return "\n".join(lines)


def _bests(found: list[Forecast]) -> list[Forecast]:
    """The best of each mode that was forecast."""
    return [best for mode in ("ar", "sd", "ssd") if (best := best_of(found, mode)) is not None]


def _record(p: Probe, turnaround_ms: float, found: list[Forecast], temp: float) -> Tuning:
    chosen = best_of(found, "ssd") or found[0]
    rehearsal = next(t for t in p.rehearsals if (t.depth, t.branches) == (chosen.depth, chosen.branches))
    fastest = sorted(_bests(found), key=lambda best: -best.tokens_per_second)
    return Tuning(
        step_ms=p.step_ms,
        verify_ms=p.verify_ms.points,
        depth_ms=p.tree_ms(chosen.branches),
        draft_ms=p.chain_ms(chosen.depth) / chosen.depth,
        link_ms=p.link_ms,
        turnaround_ms=turnaround_ms,
        acceptance=tuple(rehearsal.acceptance(position) for position in range(rehearsal.depth)),
        hit_rate=rehearsal.hit_rate,
        choices=tuple(Choice(f.mode, f.depth, f.branches, f.tokens_per_second) for f in fastest),
        temp=temp,
    )
