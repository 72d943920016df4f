"""Tables name what ran where, and the picture has room for all runners."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.commands import files
from outrider.bench.comparison import report
from outrider.bench.comparison.runs import Run, Timed
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Timings

NAMES = ("ar", "sd model K=3", "ssd K=3", "auto", "mlx-lm")
RUNS = {name: [Run(tuple(range(65)), Timed(64, 1.0 / (1 + at)))] * 3 for at, name in enumerate(NAMES)}
RUNS["ar"] = [
    Run(run.tokens, run.timed, Timings(predicted_n=65, rounds=65, predicted_ms=640.0, verify_ms=600.0))
    for run in RUNS["ar"]
]


def test_a_table_has_rates_ratios_and_notes_about_our_runners() -> None:
    table = report.format_runs(RUNS, 0.8, (1, 2), 10**6)
    assert table.startswith("T = 0.8: 3 prompts, 0% of 4-grams repeated; threads: target 1, all workers 2\n\n| ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["mlx-lm", "auto", "ssd K=3", "sd model K=3", "ar"]
    assert rows[4][1:3] == ["192.0", "3.00 [3.00, 3.00]"] and len({len(row) for row in rows}) == 1
    assert table.splitlines()[-1].startswith("- a round of ar: 10.00 ms = ")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_picture_has_a_panel_for_each_of_the_conditions(tmp_path: Path, count: int) -> None:
    figure = report.draw_runs({f"T = {number}": RUNS for number in range(count)})
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"T = {number}" for number in range(count)]
    assert all([text.get_text() for text in axes.get_yticklabels()] == [*NAMES] for axes in figure.axes)
    files.write_picture(tmp_path / "bench.png", lambda: figure)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_an_unwritable_picture_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written"):
        files.write_picture(tmp_path / "missing" / "bench.png", lambda: report.draw_runs({"T = 0": RUNS}))
