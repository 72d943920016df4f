"""Times drafting and verifying, each alone and both together, and draws a picture of real rounds."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench import picture
from outrider.bench.timing import WARM_UP_ROUNDS, workbench
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.generate import read_prompt
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.metrics import name_round
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import DraftWork, RoundRecord, Span
from outrider.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
DEFAULT_PROMPT = "def read_lines(path):\n"

# The picture starts here, after the warm-up of a request.
FIRST_DRAWN_ROUND = 8
PICTURE_TOKENS = 400
PICTURE_SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")
COMMON = (
    "--prompt", "--rounds", "--out", "--temp", "--num-draft-tokens", "--branches", "--model", "--draft-model",
    "--draft-backend", "--threads",
)  # fmt: skip
UNUSED = (
    *flags.MULTI_REQUEST_SETTINGS, "drafters", "colocate", "head", "head_in", "memory", "prompt_cache", "trace",
)  # fmt: skip
"""Overlap times one draft worker on one text, and sets --trace itself."""

SOURCES = {
    "hit": ("#2a9d4e", "verify of a cached branch"),
    "late": ("#8fcf9f", "verify of a branch that came late"),
    "miss": ("#d1495b", "verify after a miss (AR step or n-gram chain)"),
    "ngram": ("#8d6cc9", "verify of an n-gram chain"),
    "drafter": ("#e09f3e", "verify of a chain on request"),
    "head": ("#3aa6a0", "verify of a head's chain"),
    "none": ("#9aa5b1", "AR step"),
}
"""What a round can verify (`name_round`): its colour, and its words in the legend."""
DEPTH_COLOURS = ("#0b4f8a", "#2f77b5", "#5c9fd4", "#8fc1e8", "#bcdcf5")
CHAIN_COLOUR = "#e09f3e"

ROUND_PARTS = {
    "verify": "the target's forward",
    "turnaround": "hits: from one verify to the next",
    "wait for drafter": "for a branch that is on its way, or a chain on request",
    "fallback": "misses: until an AR step or an n-gram chain",
    "round": "sum of the above",
    "commit": "hidden: until the drafter begins",
    "work ahead": "hidden: the drafter works",
}
"""The parts of a round, and what each is."""

# The part to which the wait before a verify is counted, by the chain's source (default: fallback).
WAIT_PARTS = {"hit": "turnaround", "late": "wait for drafter", "drafter": "wait for drafter"}


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over rounds in milliseconds. `verify`: the target alone. `ahead`: the drafter alone. `both`: together,
    from the first start to the last end. `verify_in_both`, `ahead_in_both`: each while the other ran."""

    rounds: int
    depth: int
    branches: int
    verify: float
    ahead: float
    both: float
    verify_in_both: float
    ahead_in_both: float

    @property
    def efficiency(self) -> float:
        """1: the shorter is fully hidden behind the longer; 0: no overlap."""
        return (self.verify + self.ahead - self.both) / min(self.verify, self.ahead)

    @property
    def speedup(self) -> float:
        return (self.verify + self.ahead) / self.both


def add_flags(parser: argparse.ArgumentParser) -> None:
    start = "text to continue; - reads it from stdin (default: the first line of a function)"
    parser.add_argument("--prompt", "-p", default=DEFAULT_PROMPT, metavar="PROMPT", help=start)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="rounds of each kind (default: 40)")
    where = "picture to write, or a folder for rounds.png; the trace goes to the same folder (default: out)"
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FILE|DIR", help=where)
    temp = "temperature of the real rounds (default: 0)"
    parser.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help=temp)
    flags.add_request_flags(parser, ("mode", "drafter"))
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    values.check_int("rounds", options.rounds, 1, 1000)
    SamplingParams(temp=options.temp)  # checks the temperature before anything starts
    pair = choose_pair(ServeSettings(**flags.settings_of(options)))
    settings = pair.settings
    if settings.drafts_with_head:
        raise InvalidRequest(
            f"overlap times a drafter that runs in parallel with the target, but a head ({settings.draft_backend}) and"
            " the target take turns; expected a draft model; `outrider generate --trace FILE` records a head's rounds"
        )
    if not settings.has_draft_worker:
        raise InvalidRequest("overlap needs a draft model; expected --draft-model, and a --draft-backend that uses it")
    prompt, out = read_prompt(options.prompt), options.out
    drawn = out if out.suffix.lower() in PICTURE_SUFFIXES and not out.is_dir() else out / "rounds.png"
    ensure_writable(drawn.parent, "choose another --out")
    trace, screen = drawn.with_suffix(".json"), Screen()
    measured = _measure(pair, prompt, options.rounds, screen)
    records = _run_ssd_rounds(options, prompt, trace, screen)
    screen.clear()
    print(_format_table(measured))
    print(format_breakdown(*compute_breakdown(records, FIRST_DRAWN_ROUND)))
    title = f"SSD, K = {settings.depth}, B = {settings.breadth}, T = {options.temp:g}"
    if picture.write(drawn, lambda: draw_rounds(records, title, FIRST_DRAWN_ROUND, 10)):
        print(f"ten rounds: {drawn}")
    print(f"trace:      {trace} (open it at ui.perfetto.dev)")
    return 0


def _measure(pair: ChosenPair, prompt: str, rounds: int, screen: Screen) -> Overlap:
    """Runs `rounds` rounds of each kind over text that the target generated, so that each verify accepts its chain.

    Raises:
        InvalidRequest: that text exceeds a context.
        WorkerError: a worker was lost or did not answer.
    """
    depth, branches = pair.settings.depth, pair.settings.breadth
    tokens, length = load_codec(pair.target).encode(prompt), (WARM_UP_ROUNDS + rounds) * (depth + 1) + 1
    most = min(model.context_length or 1 << 31 for model in (pair.target, pair.draft) if model is not None)
    if (needed := len(tokens) + length) > most:
        raise InvalidRequest(f"{rounds} rounds need {needed} tokens, and the context is {most}; expected fewer rounds")
    with workbench(pair.settings, screen.show) as bench:
        screen.show("timing rounds")
        text, _ = bench.text(tokens, length, GREEDY)
        timed = partial(bench.rounds, (len(tokens), text), GREEDY, depth, rounds)
        verify = timed(lambda at: bench.verify(at.number, at.base_len, at.chain).work, drafter=False)
        ahead = timed(lambda at: bench.work_ahead(at, depth, branches), target=False)
        parallel = timed(lambda at: bench.both(at, depth, branches))
    spans = (verify, ahead, *zip(*parallel, strict=True))
    medians = (statistics.median(span.milliseconds for span in found) for found in spans)
    return Overlap(rounds, depth, branches, *medians)


def _run_ssd_rounds(options: argparse.Namespace, prompt: str, trace: Path, screen: Screen) -> list[RoundRecord]:
    """Generates with SSD and --trace."""
    chosen = {**flags.settings_of(options), "trace": trace}
    with LocalCluster(progress=screen.show, **chosen) as cluster:
        screen.show("generating real rounds")
        sampling = SamplingParams(max_tokens=PICTURE_TOKENS, temp=options.temp, seed=7, ignore_eos=True)
        stream = cluster.client().stream(prompt, sampling, mode="ssd", rounds=True, chat_template=False)
        return [record for chunk in stream for record in chunk.rounds or ()]


def _format_table(o: Overlap) -> str:
    scale = "1: the shorter is fully hidden; 0: no overlap"
    if o.efficiency > 1:
        scale += ". Above 1: other load or a changing clock rate slowed the times alone; measure again"
    if o.efficiency < 0:
        scale += ". Below 0: together they take longer than one after the other"
    rows = [
        ("verify alone", f"{o.verify:.2f} ms", f"one forward over {o.depth + 1} tokens"),
        ("work ahead alone", f"{o.ahead:.2f} ms", f"{o.branches} branches, {o.depth} tokens deep"),
        ("both together", f"{o.both:.2f} ms", f"verify {o.verify_in_both:.2f}, work ahead {o.ahead_in_both:.2f}"),
        ("overlap efficiency", f"{o.efficiency:.2f}", scale),
        ("speedup", f"{o.speedup:.2f}x", "sequential time over parallel time"),
    ]
    return f"medians of {o.rounds} rounds\n" + "\n".join(
        f"  {name:20}{value:>10}   {note}" for name, value, note in rows
    )


def draw_rounds(records: Sequence[RoundRecord], title: str, first_round: int, rounds: int) -> Figure:
    """Draws `rounds` rounds from `first_round`.

    Raises:
        InvalidRequest: there are no such rounds.
    """
    numbers = range(first_round, first_round + rounds)
    chosen = [record for record in records if record.round in numbers]
    drafting = [work for record in records for work in record.drafting if work.round in numbers]
    if not chosen:
        raise InvalidRequest(f"there are no rounds {numbers[0]} to {numbers[-1]}; generate more tokens")
    tracks = ["target", *sorted({work.drafter for work in drafting})]
    figure = picture.create_figure(15, 1.6 + 1.1 * len(tracks))
    axes = figure.subplots()
    origin_ns = min(record.verify.started_ns for record in chosen)
    for record in chosen:
        colour, _ = SOURCES[name_round(record.lookup, record.source)]
        _draw_bar(axes, 0, record.verify, origin_ns, colour, str(record.tokens))
    for work in drafting:
        label = str(work.depth) if work.branches or not work.depth else "chain"
        _draw_bar(axes, tracks.index(work.drafter), work.work, origin_ns, _drafting_colour(work), label)
    end = Span(origin_ns, max(record.verify.ended_ns for record in chosen)).milliseconds
    busy = sum(record.verify.milliseconds for record in chosen) / end
    axes.set_title(f"{title}   (target busy {busy:.0%} of {end:.0f} ms)", loc="left", fontsize=11)
    axes.set_xlim(-0.01 * end, end * 1.01)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, one clock for all processes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_legend(axes, {name_round(one.lookup, one.source) for one in chosen}, set(map(_drafting_colour, drafting)))
    return figure


def _draw_bar(axes: Axes, row: int, span: Span, origin_ns: int, colour: str, label: str) -> None:
    start, length = (span.started_ns - origin_ns) / MILLISECOND_NS, span.milliseconds
    axes.broken_barh([(start, length)], (row - 0.36, 0.72), color=colour, edgecolor="white")
    axes.text(start + length / 2, row, label, ha="center", va="center", color="white", fontsize=8)


def _drafting_colour(work: DraftWork) -> str:
    if work.depth and not work.branches:
        return CHAIN_COLOUR
    return DEPTH_COLOURS[min(max(work.depth - 1, 0), len(DEPTH_COLOURS) - 1)]


def _draw_legend(axes: Axes, sources: set[str], shades: set[str]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[tuple[str, ...], str]] = [
        ((colour,), words) for source, (colour, words) in SOURCES.items() if source in sources
    ]
    if used := tuple(shade for shade in DEPTH_COLOURS if shade in shades):
        entries.append((used, "all branches one token deeper (number: their depth)"))
    if CHAIN_COLOUR in shades:
        entries.append(((CHAIN_COLOUR,), "chain on request"))
    entries.append((("none",), "number on the target: tokens committed"))
    axes.legend(
        handles=[tuple(Patch(color=colour) for colour in colours) for colours, _ in entries],
        labels=[words for _, words in entries], handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip


def compute_breakdown(records: Sequence[RoundRecord], first_round: int) -> tuple[int, dict[str, float]]:
    """Returns the number of rounds from `first_round` on, and the mean milliseconds of each of their `ROUND_PARTS`.

    Raises:
        InvalidRequest: there are fewer than two such rounds.
    """
    chosen = [record for record in records if record.round >= first_round]
    if len(chosen) < 2:
        raise InvalidRequest(f"there are fewer than two rounds from {first_round} on; generate more tokens")
    drafting = defaultdict[int, list[Span]](list)
    for record in records:
        for work in record.drafting:
            drafting[work.round].append(work.work)
    spans: dict[str, list[Span]] = {part: [] for part in ROUND_PARTS}
    for before, after in pairwise(chosen):
        ended_ns, works = before.verify.ended_ns, drafting[after.round]
        waited_for = WAIT_PARTS.get(name_round(after.lookup, after.source), "fallback")
        spans["verify"].append(after.verify)
        spans[waited_for].append(Span(ended_ns, after.verify.started_ns))
        spans["round"].append(Span(ended_ns, after.verify.ended_ns))
        spans["commit"] += [Span(ended_ns, min(work.started_ns for work in works))] if works else []
        spans["work ahead"] += works
    rounds = len(chosen) - 1
    counts = dict.fromkeys(ROUND_PARTS, rounds) | {"commit": max(len(spans["commit"]), 1)}
    return rounds, {part: sum(span.milliseconds for span in of) / counts[part] for part, of in spans.items()}


def format_breakdown(rounds: int, means: Mapping[str, float]) -> str:
    head = f"time of {rounds} rounds of SSD, mean milliseconds per round"
    return "\n".join([head, *(f"  {part:20}{means[part]:>7.2f}      {what}" for part, what in ROUND_PARTS.items())])
