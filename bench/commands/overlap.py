"""Generates with SSD and SD, tells how far drafting and verifying overlap, and draws a picture of rounds."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.commands.files import write_picture
from outrider.bench.comparison.runs import median_by_number
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.generate import read_prompt
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.metrics import name_round
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import RoundRecord, Span
from outrider.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_PROMPT = "def read_lines(path):\n"

FIRST_ROUND = 8
"""The first round that counts, after the warm-up of a request."""
TOKENS = 400
PICTURE_SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")
COMMON = (
    "--prompt", "--out", "--temp", "--num-draft-tokens", "--branches", "--model", "--draft-model", "--draft-backend",
    "--threads",
)  # fmt: skip
UNUSED = (
    *flags.MULTI_REQUEST_SETTINGS, "drafters", "colocate", "head", "head_in", "memory", "prompt_cache", "trace",
)  # fmt: skip
"""Overlap times one draft worker on one text, and sets --trace itself."""

SOURCES = {
    "hit": ("#2a9d4e", "verify of a cached branch"),
    "late": ("#8fcf9f", "verify of a branch that came late"),
    "miss": ("#d1495b", "verify after a miss (AR step or n-gram chain)"),
    "copied": ("#8d6cc9", "verify of an n-gram chain"),
    "drafted": ("#e09f3e", "verify of a chain on request"),
    "head": ("#3aa6a0", "verify of a head's chain"),
    "target": ("#9aa5b1", "AR step"),
}
"""What a round can verify (`name_round`): its colour, and its words in the legend."""
DRAFTING = {
    "branches": ("#2f77b5", "all branches one token deeper (number: their depth)"),
    "chain": ("#e09f3e", "chain on request"),
}
"""The same for what a drafter works on."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    start = "text to continue; - reads it from stdin (default: the first line of a function)"
    parser.add_argument("--prompt", "-p", default=DEFAULT_PROMPT, metavar="PROMPT", help=start)
    where = "picture to write, or a folder for rounds.png; the trace goes to the same folder (default: out)"
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FILE|DIR", help=where)
    temp = "temperature (default: 0)"
    parser.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help=temp)
    flags.add_request_flags(parser, ("mode", "drafter"))
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    SamplingParams(temp=options.temp)  # checks the temperature before anything starts
    settings = choose_pair(ServeSettings(**flags.settings_of(options))).settings
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
    records = _run_rounds(options, prompt, trace, screen)
    screen.clear()
    print(describe(records["ssd"], records["sd"]))
    title = f"SSD, K = {settings.depth}, B = {settings.breadth}, T = {options.temp:g}"
    write_picture(drawn, lambda: draw_rounds(records["ssd"], title, 10))
    print(f"trace:   {trace} (open it at ui.perfetto.dev)")
    return 0


def _run_rounds(options: argparse.Namespace, prompt: str, trace: Path, screen: Screen) -> dict[str, list[RoundRecord]]:
    """Continues the prompt with SSD and with SD, in which the drafter waits during a verify. Returns the rounds of each
    after the first ones, and writes their trace."""
    sampling = SamplingParams(max_tokens=TOKENS, temp=options.temp, seed=7, ignore_eos=True)
    records: dict[str, list[RoundRecord]] = {}
    with LocalCluster(progress=screen.show, **{**flags.settings_of(options), "trace": trace}) as cluster:
        for mode in ("ssd", "sd"):
            screen.show(f"generating with {mode}")
            stream = cluster.client().stream(prompt, sampling, mode=mode, rounds=True, chat_template=False)
            rounds = [record for chunk in stream for record in chunk.rounds or ()]
            records[mode] = [record for record in rounds if record.round >= FIRST_ROUND]
    return records


def describe(ssd: Sequence[RoundRecord], sd: Sequence[RoundRecord]) -> str:
    """Describes how far verifying and drafting overlap in rounds of SSD, and how much they slow the verify.

    Raises:
        InvalidRequest: there are no rounds.
    """
    if not ssd or not sd:
        raise InvalidRequest(f"there are no rounds from {FIRST_ROUND} on; expected a longer context")
    alone = median_by_number((record.drafted, record.verify.milliseconds) for record in sd)
    alone_ms = np.interp([record.drafted for record in ssd], list(alone), list(alone.values()))
    slowdown = np.median([record.verify.milliseconds for record in ssd] / alone_ms)
    verifies, works = [record.verify for record in ssd], [work.work for record in ssd for work in record.drafting]
    drafting_ms = sum(work.milliseconds for work in works)
    hidden_ms = sum(_common_ms(work, verify) for work in works for verify in verifies)
    verify_ms = statistics.fmean(verify.milliseconds for verify in verifies)
    during = f"{hidden_ms / drafting_ms:.0%} of it during verifies" if works else "nothing was drafted"
    return (
        f"{len(ssd)} rounds of SSD, mean milliseconds per round\n"
        f"  verify    {verify_ms:8.2f}   {slowdown:.2f} times as long as in SD, where the drafter waits for it\n"
        f"  drafting  {drafting_ms / len(ssd):8.2f}   {during}\n"
        f"  target busy for {_busy_share(verifies):.0%} of the time"
    )


def _common_ms(one: Span, other: Span) -> float:
    """Returns the time that two spans have in common."""
    common_ns = min(one.ended_ns, other.ended_ns) - max(one.started_ns, other.started_ns)
    return max(common_ns, 0) / MILLISECOND_NS


def _busy_share(verifies: Sequence[Span]) -> float:
    whole = Span(min(one.started_ns for one in verifies), max(one.ended_ns for one in verifies))
    return sum(one.milliseconds for one in verifies) / whole.milliseconds


def draw_rounds(records: Sequence[RoundRecord], title: str, rounds: int) -> Figure:
    """Draws the first `rounds` rounds, with the drafting for them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    chosen = records[:rounds]
    numbers = {record.round for record in chosen}
    drafting = [work for record in records for work in record.drafting if work.round in numbers]
    tracks = ["target", *sorted({work.drafter for work in drafting})]
    figure = Figure(figsize=(15, 1.6 + 1.1 * len(tracks)), layout="constrained")
    axes = figure.subplots()
    origin_ns, legend = min(record.verify.started_ns for record in chosen), dict[str, str]()
    for record in chosen:
        colour, words = SOURCES[name_round(record.lookup, record.source)]
        legend[words] = colour
        _draw_bar(axes, 0, record.verify, origin_ns, colour, str(record.tokens))
    for work in drafting:
        colour, words = DRAFTING["branches" if work.branches or not work.depth else "chain"]
        legend[words] = colour
        _draw_bar(axes, tracks.index(work.drafter), work.work, origin_ns, colour, str(work.depth))
    end = Span(origin_ns, max(record.verify.ended_ns for record in chosen)).milliseconds
    busy = _busy_share([record.verify for record in chosen])
    axes.set_title(f"{title}   (target busy {busy:.0%} of {end:.0f} ms)", loc="left", fontsize=11)
    axes.set_xlim(-0.01 * end, end * 1.01)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, one clock for all processes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend["number on the target: tokens committed"] = "none"
    axes.legend(
        [Patch(color=colour) for colour in legend.values()], legend, loc="upper center", bbox_to_anchor=(0.5, -0.22),
        ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    return figure


def _draw_bar(axes: Axes, row: int, span: Span, origin_ns: int, colour: str, label: str) -> None:
    start, length = (span.started_ns - origin_ns) / MILLISECOND_NS, span.milliseconds
    axes.broken_barh([(start, length)], (row - 0.36, 0.72), color=colour, edgecolor="white")
    axes.text(start + length / 2, row, label, ha="center", va="center", color="white", fontsize=8)
