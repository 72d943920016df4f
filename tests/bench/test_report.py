"""Tables name what ran where."""

from __future__ import annotations

from outrider.bench.comparison import report
from outrider.bench.comparison.runs import Run, Timed
from outrider.protocol.messages import Timings

NAMES = ("ar", "sd model K=3", "ssd K=3", "auto", "mlx-lm")
RUNS = {name: [Run(tuple(range(65)), Timed(64, 1.0 / (1 + at)))] * 3 for at, name in enumerate(NAMES)}
RUNS["ar"] = [
    Run(run.tokens, run.timed, Timings(predicted_n=65, rounds=65, predicted_ms=640.0, verify_ms=600.0))
    for run in RUNS["ar"]
]


def make_sections() -> list[report.Section]:
    return report.make_sections(RUNS, ["code", "json", "code"], 0.8, (1, 2), 10**6)


def test_a_table_has_rates_ratios_and_notes_about_our_runners() -> None:
    first, *_ = make_sections()
    table = report.format_section(first)
    assert "all, T = 0.8: 3 prompts, 0% of 4-grams repeated; threads: target 1, all workers 2" in table
    row = next(line for line in table.splitlines() if line.startswith("| ssd"))
    assert [cell.strip() for cell in row.split("|")][2:4] == ["192.0", "3.00 [3.00, 3.00]"]
    (note,) = first.notes
    assert note.startswith("- a round of ar: 10.00 ms = ") and table.endswith(f"\n\n{note}")


def test_each_class_has_a_table_of_its_prompts_without_notes() -> None:
    for section, kind, count in zip(make_sections()[1:], ("code", "json"), (2, 1), strict=True):
        assert (section.kind, section.prompts, section.notes) == (kind, count, ())
        assert [row.name for row in section.rows] == ["mlx-lm", "auto", "ssd K=3", "sd model K=3", "ar"]
        assert len({line.count("|") for line in report.format_section(section).splitlines() if "|" in line}) == 1
