"""Times a verify and the drafter's work ahead, each alone and both together.

    python -m tools.overlap_timing --model MODEL --draft-model DRAFT
    python -m tools.overlap_timing --model MODEL --draft-model DRAFT --draft-backend coreml --rounds 100

`launch/overlap_timing.py` does the same with the default model.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial

from outrider.bench.commands.overlap import DEFAULT_PROMPT, UNUSED
from outrider.orchestrator.cli import flags, run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tools.workbench import WARM_UP_ROUNDS, workbench

GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


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
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="rounds of each kind (default: 40)")
    flags.add_request_flags(parser, ("mode", "drafter"))
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    values.check_int("rounds", options.rounds, 1, 1000)
    pair, screen = choose_pair(ServeSettings(**flags.settings_of(options))), Screen()
    if not pair.settings.has_draft_worker:
        raise InvalidRequest("there is no draft worker to time; expected --draft-model, or another --draft-backend")
    measured = measure(pair, options.rounds, screen)
    screen.clear()
    print(format_table(measured))
    return 0


def measure(pair: ChosenPair, rounds: int, screen: Screen) -> Overlap:
    """Runs `rounds` rounds of each kind over text that the target generated, so that each verify accepts its chain.

    Raises:
        InvalidRequest: that text exceeds a context.
        WorkerError: a worker was lost or did not answer.
    """
    depth, branches = pair.settings.depth, pair.settings.breadth
    tokens, length = load_codec(pair.target).encode(DEFAULT_PROMPT), (WARM_UP_ROUNDS + rounds) * (depth + 1) + 1
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


def format_table(o: Overlap) -> str:
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


if __name__ == "__main__":
    raise SystemExit(run_as_program())
