"""Which outcomes a drafter with all the time in the world would have prepared for.

Reads one JSON object a line from stdin, {tokens, chain, accepted, bonus, branches, temp, seed}: the round that verified
`chain` after `tokens` and ended with (accepted, bonus). Answers {covered, prepared}. Each round has a fresh tree on the
true tokens, so nothing a running drafter may have got wrong or late is in it; only the calibration goes on from round
to round, as it does in a worker. The fan-out is the worker's own.
"""

from __future__ import annotations

import argparse
from typing import Any

from outrider.bench.helper import answer_all
from outrider.drafting.calibration import Calibration
from outrider.drafting.fan_out import POLICIES
from outrider.drafting.growth import Ready, Wanted
from outrider.drafting.mlx import MlxDrafter
from outrider.drafting.together import Together
from outrider.drafting.work_ahead import WorkAhead
from outrider.engine.loading import load
from outrider.orchestrator.cli import run_as_program
from outrider.protocol.sampling import SamplingParams


class Oracle:
    """Prepares for one round after the other."""

    def __init__(self, drafter: MlxDrafter, policy: str) -> None:
        self._drafter = drafter
        self._policy = POLICIES[policy]
        self._calibration = Calibration()
        self._together = Together(drafter)

    def prepared(self, asked: dict[str, Any]) -> set[tuple[int, ...]]:
        """The outcomes it would prepare; then it learns which one it was."""
        tree = self._drafter.open(asked["tokens"], SamplingParams(temp=asked["temp"], seed=asked["seed"]))
        work = WorkAhead(tree, (), self._policy, self._calibration)
        work.commit((), Wanted(asked["chain"], 1, asked["branches"]))
        found: set[tuple[int, ...]] = set()
        while work.busy:
            (ready,) = self._together.advance([work])
            found |= {entry.committed for entry in ready.entries} if isinstance(ready, Ready) else set()
        work.commit([*asked["chain"][: asked["accepted"]], asked["bonus"]], Wanted(None, 0))
        tree.close()
        return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--fan-out", choices=sorted(POLICIES), required=True)


def run(options: argparse.Namespace) -> int:
    oracle = Oracle(MlxDrafter(load(options.model)), options.fan_out)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        found = oracle.prepared(asked)
        outcome = (*asked["chain"][: asked["accepted"]], asked["bonus"])
        return {"covered": outcome in found, "prepared": len(found)}

    answer_all(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
