"""Tables name what ran where, and the picture has room for all runners."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.comparison import report
from outrider.bench.comparison.runners import BOTH_CORES, main_table_runs, second_table_runs
from outrider.bench.comparison.runs import Run, Timed
from outrider.bench.comparison.summary import FormulaComparison
from outrider.protocol.errors import InvalidRequest

NAMES = ("ar", "sd model K=3", "ssd K=3", "auto", "mlx-lm", "ar, both cores", "mlx-lm sd K=3, both cores")
RUNS = {name: [Run(tuple(range(65)), Timed(64, 1.0 / (1 + at)))] * 3 for at, name in enumerate(NAMES)}


def made(kind: str = "code") -> report.Section:
    judged = {"ssd K=3": FormulaComparison(190.0, 200.0, 13.0, 12.5, 0.4, 0.4)}
    return report.section(kind, 0.8, "1 BLAS thread per worker", main_table_runs(RUNS), "ar", judged, ["- a line"])


def test_a_table_shows_the_measured_share_of_the_formulas_prediction() -> None:
    table = report.table(made())
    assert "code, T = 0.8: 3 prompts, 0% of 4-grams repeated; 1 BLAS thread per worker" in table
    assert "of predicted" in table
    row = next(line for line in table.splitlines() if line.startswith("| ssd"))
    assert [cell.strip() for cell in row.split("|")][2:5] == ["192.0", "3.00 [3.00, 3.00]", "0.95"]
    assert table.endswith("\n\n- a line")


def test_table_without_predictions_has_no_prediction_column() -> None:
    second = report.section("code", 0.0, "both cores", second_table_runs(RUNS), "ar, both cores", {})
    assert "of predicted" not in report.table(second)
    assert len({line.count("|") for line in report.table(second).splitlines() if "|" in line}) == 1


def test_each_runner_is_in_the_table_for_its_cores() -> None:
    assert [row.name for row in made().rows] == ["mlx-lm", "auto", "ssd K=3", "sd model K=3", "ar"]
    assert set(second_table_runs(RUNS)) == {"ssd K=3", "auto", *(name for name in NAMES if name.endswith(BOTH_CORES))}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_picture_is_drawn_for_any_number_of_tables(tmp_path: Path, count: int) -> None:
    report.draw([made()] * count, tmp_path / "bench.png", "test")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_unwritable_picture_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written"):
        report.draw([made()], tmp_path / "missing" / "bench.png", "test")
