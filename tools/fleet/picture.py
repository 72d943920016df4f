"""Two pictures: tokens a second over time with what was lost, and waiting over load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.bench import picture
from tools.fleet.plan import Loss
from tools.fleet.simulation import Outcome
from tools.fleet.tally import smooth

DPI, SMOOTH = 80, 7


def over_time(outcome: Outcome, loss: Loss | None, path: Path, without: Outcome | None = None) -> None:
    """Tokens a second above, beside what the same traffic brought `without` the loss; requests and engines below."""
    figure = picture.figure(8.0, 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    looks = outcome.tally.looks
    seconds = len(looks) - 1
    if without is not None:
        above.plot(range(seconds), smooth(without.tally, seconds, SMOOTH), color="0.7", label="without the loss")
    above.plot(range(seconds), smooth(outcome.tally, seconds, SMOOTH), color="C0", label="tokens a second")
    below.plot(range(len(looks)), [look.running for look in looks], color="C2", label="requests running")
    below.plot(range(len(looks)), [look.waiting for look in looks], color="C3", label="waiting")
    below.plot(range(len(looks)), [look.engines for look in looks], color="k", linestyle=":", label="engines")
    for axes in (above, below):
        if loss is not None:
            axes.axvline(loss.at, color="C3", linewidth=0.8)
            if loss.back is not None:
                axes.axvline(loss.at + loss.back, color="C2", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", fontsize=8, ncols=3)
    below.set_xlabel("seconds")
    picture.save(figure, path, DPI)


def over_load(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Tokens a second left, the first token and the line right, by requests a second."""
    figure = picture.figure(8.0, 3.2)
    left, right = figure.subplots(1, 2)
    rates = [float(rate) for rate in outcomes]
    found = [outcome.sums for outcome in outcomes.values()]
    left.plot(rates, [one.rate for one in found], marker="o", label="tokens a second")
    left.plot(rates, [one.good for one in found], marker="o", label="of requests served well")
    right.plot(rates, [one.first[0] for one in found], color="C0", label="first token p50, s")
    right.plot(rates, [one.first[1] for one in found], color="C0", linestyle="--", label="p99")
    right.plot(rates, [one.queued[0] for one in found], color="C3", label="queued p50, s")
    right.plot(rates, [one.queued[1] for one in found], color="C3", linestyle="--", label="p99")
    right.set_yscale("symlog", linthresh=1.0)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests a second")
        axes.legend(fontsize=8)
    picture.save(figure, path, DPI)
