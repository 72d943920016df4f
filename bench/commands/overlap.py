"""Times drafting and verifying, each alone and both together, and draws a picture of real rounds."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.bench import picture
from outrider.bench.rounds import compute_breakdown, draw_rounds, format_breakdown
from outrider.bench.timing import WARM_UP_ROUNDS, workbench
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.generate import read_prompt
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import RoundRecord
from outrider.protocol.sampling import SamplingParams

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
UNUSED = (*flags.MULTI_REQUEST_SETTINGS, "colocate", "head", "head_in", "memory", "prompt_cache", "trace")
"""Overlap times a draft worker on one text, and sets --trace itself."""


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
        raise InvalidRequest(f"overlap needs a draft model; draft_backend {settings.draft_backend} has none")
    prompt, out = read_prompt(options.prompt), options.out
    drawn = out if out.suffix.lower() in PICTURE_SUFFIXES and not out.is_dir() else out / "rounds.png"
    ensure_writable(drawn.parent, "choose another --out")
    trace, screen = drawn.with_suffix(".json"), Screen()
    measured = _measure(pair, prompt, options.rounds, screen)
    records = _run_ssd_rounds(options, prompt, trace, screen)
    screen.clear()
    print(_format_table(measured))
    print(format_breakdown(compute_breakdown(records, FIRST_DRAWN_ROUND)))
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
