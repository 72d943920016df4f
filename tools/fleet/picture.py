"""Draws tokens per second over time with a loss, and latencies over load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools import picture
from tools.fleet.metrics import smooth_rates
from tools.fleet.plan import Loss
from tools.fleet.simulation import FleetResult

DPI, SMOOTHING_SECONDS = 80, 7


def draw_over_time(result: FleetResult, loss: Loss | None, path: Path, without: FleetResult | None = None) -> None:
    """Draws tokens per second, also of the same traffic `without` the loss; below them requests and engines."""
    figure = picture.create_figure(8.0, 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    samples = result.metrics.samples
    seconds = len(samples) - 1
    if without is not None:
        above.plot(
            range(seconds),
            smooth_rates(without.metrics, seconds, SMOOTHING_SECONDS),
            color="0.7",
            label="without the loss",
        )
    above.plot(
        range(seconds), smooth_rates(result.metrics, seconds, SMOOTHING_SECONDS), color="C0", label="tokens per second"
    )
    below.plot(range(len(samples)), [sample.running for sample in samples], color="C2", label="requests running")
    below.plot(range(len(samples)), [sample.waiting for sample in samples], color="C3", label="waiting")
    below.plot(range(len(samples)), [sample.engines for sample in samples], color="k", linestyle=":", label="engines")
    for axes in (above, below):
        if loss is not None:
            axes.axvline(loss.at, color="C3", linewidth=0.8)
            if loss.back is not None:
                axes.axvline(loss.at + loss.back, color="C2", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", fontsize=8, ncols=3)
    below.set_xlabel("seconds")
    picture.save(figure, path, DPI)


def draw_over_load(results: Mapping[str, FleetResult], path: Path) -> None:
    """Draws tokens per second (left), and the time to first token and in the queue (right), by requests per second."""
    figure = picture.create_figure(8.0, 3.2)
    left, right = figure.subplots(1, 2)
    rates = [float(rate) for rate in results]
    summaries = [result.summary for result in results.values()]
    left.plot(rates, [one.rate for one in summaries], marker="o", label="tokens per second")
    left.plot(rates, [one.good for one in summaries], marker="o", label="of requests served well")
    right.plot(rates, [one.first[0] for one in summaries], color="C0", label="first token p50, s")
    right.plot(rates, [one.first[1] for one in summaries], color="C0", linestyle="--", label="p99")
    right.plot(rates, [one.queued[0] for one in summaries], color="C3", label="queued p50, s")
    right.plot(rates, [one.queued[1] for one in summaries], color="C3", linestyle="--", label="p99")
    right.set_yscale("symlog", linthresh=1.0)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests per second")
        axes.legend(fontsize=8)
    picture.save(figure, path, DPI)
