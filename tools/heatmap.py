"""Draws where working ahead pays: SSD over the better of AR and SD, by acceptance, draft latency, link and batch.

    python -m tools.heatmap tools/simulation/profiles/h100-llama-70b.json --out docs/where-ssd-pays.png

The target, the bonus ranks and the shape of the draft curve are those of the profile; each cell uses the best K for SD
and for SSD. `simulator.py` computes everything, without processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from tools import picture
from tools.latency import Latency
from tools.simulation.profile import Profile
from tools.simulation.simulator import Policy, Simulator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCEPTANCES = (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
# A draft step of one row, in target steps of one token.
DRAFT_STEPS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7)
# Round-trip times of the link, in target steps of one token.
ROUND_TRIPS = (0.0, 0.1, 0.5)
BATCHES = (1, 8)
DEPTHS = (1, 2, 3, 5, 8)
BRANCHES = 16
TOKENS = 1500
# Limits of the colours; a cell beyond them still shows its number.
MIN_COLOUR_GAIN, MAX_COLOUR_GAIN = 0.7, 1.9


@dataclass(frozen=True, slots=True)
class Panel:
    """One heat map: `gains[row][column]` is SSD over the better of AR and SD at an acceptance and a draft step."""

    batch: int
    round_trip: float
    gains: tuple[tuple[float, ...], ...]
    plain: tuple[tuple[bool, ...], ...]
    """Whether AR is better than SD, by row and column."""


def compute_panel(profile: Profile, batch: int, round_trip: float) -> Panel:
    cells = [[_compute_cell(profile, batch, round_trip, rate, step) for step in DRAFT_STEPS] for rate in ACCEPTANCES]
    gains = tuple(tuple(ssd / max(ar, sd) for ar, sd, ssd in row) for row in cells)
    return Panel(batch, round_trip, gains, tuple(tuple(ar > sd for ar, sd, _ in row) for row in cells))


def _compute_cell(
    profile: Profile, batch: int, round_trip: float, rate: float, step: float
) -> tuple[float, float, float]:
    """Returns the tokens per second of AR, SD and SSD."""
    token_ms = profile.target(1)
    scale = step * token_ms / profile.draft(1)
    machine = replace(
        profile,
        draft=Latency(tuple((rows, ms * scale) for rows, ms in profile.draft.points)),
        link_ms=round_trip * token_ms / 2,
        acceptance=(rate,),
    )

    def best(mode: str) -> float:
        policies = [Policy(mode, depth, BRANCHES) for depth in DEPTHS]
        return max(Simulator(machine, policy, batch).run(TOKENS // batch).tokens_per_second for policy in policies)

    return 1000 * batch / machine.target(batch), best("sd"), best("ssd")


def draw(panels: Sequence[Panel], profile: Profile, path: Path) -> None:
    figure = picture.create_figure(5.2 * len(ROUND_TRIPS), 4.6 * len(BATCHES) + 0.8)
    grid = figure.subplots(len(BATCHES), len(ROUND_TRIPS), sharex=True, sharey=True, squeeze=False)
    for axes, found in zip(grid.flat, panels, strict=True):
        image = _draw_panel(axes, found)
    for axes in grid[-1]:
        axes.set_xlabel("one draft step / one target token")
    for axes in grid[:, 0]:
        axes.set_ylabel("acceptance of a draft token")
    figure.colorbar(image, ax=grid, shrink=0.6, label="SSD / the better of AR and SD", extend="both")
    figure.suptitle(
        f"{profile.name}: the gain of working ahead\nB = {BRANCHES}, best K for each;"
        " right of and below the dashed line AR is faster than SD",
        fontsize=11,
    )
    picture.save(figure, path, 90)


def _draw_panel(axes: Axes, found: Panel):  # type: ignore[no-untyped-def]  # matplotlib's image
    from matplotlib.colors import TwoSlopeNorm

    norm = TwoSlopeNorm(1.0, MIN_COLOUR_GAIN, MAX_COLOUR_GAIN)
    image = axes.imshow(found.gains, origin="lower", aspect="auto", cmap="RdBu", norm=norm)
    for row, gains in enumerate(found.gains):
        for column, gain in enumerate(gains):
            dark = abs(norm(gain) - 0.5) > 0.3
            axes.text(column, row, f"{gain:.2f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    if any(map(any, found.plain)) and not all(map(all, found.plain)):
        axes.contour([[float(cell) for cell in row] for row in found.plain], [0.5], colors="k", linestyles="--")
    axes.set_xticks(range(len(DRAFT_STEPS)), [f"{step:g}" for step in DRAFT_STEPS], fontsize=8)
    axes.set_yticks(range(len(ACCEPTANCES)), [f"{rate:.2f}" for rate in ACCEPTANCES], fontsize=8)
    link = f"round trip {found.round_trip:g} target tokens" if found.round_trip else "no link latency"
    axes.set_title(f"batch {found.batch}, {link}", fontsize=10, loc="left")
    return image


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, help="latency profile")
    parser.add_argument(
        "--out", type=Path, default=Path("heatmap.png"), metavar="FILE", help="file to write (default: heatmap.png)"
    )


def run(options: argparse.Namespace) -> int:
    profile = Profile.read(options.profile)
    ensure_writable(options.out.parent, "choose another --out")
    draw([compute_panel(profile, batch, trip) for batch in BATCHES for trip in ROUND_TRIPS], profile, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
