"""Acceptance of heads: sums over prompts by position, and prompts from files that the head was not trained on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from outrider.protocol.messages import Timings
from tools.heads import HeadResult, draw, format_table, held_out_beginnings

ROUNDS = (
    Timings(predicted_n=10, rounds=4, accepted_by_position=(3, 2, 1), drafted_by_position=(4, 4, 4)),
    Timings(predicted_n=6, rounds=4, accepted_by_position=(1, 0), drafted_by_position=(4, 2)),
)


def test_head_acceptance_is_summed_over_all_prompts() -> None:
    found = HeadResult("eagle3", 0.8, ROUNDS)
    assert found.per_verify.value == 2.0
    assert found.by_position == pytest.approx([4 / 8, 2 / 6, 1 / 4])
    assert format_table([found])[1].startswith("0.8   eagle3           2.00 [")


def test_head_results_are_drawn(tmp_path: Path) -> None:
    draw(
        [HeadResult(name, temp, ROUNDS) for name in ("draft model", "eagle3") for temp in (0.0, 0.8)],
        tmp_path / "a.png",
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_held_out_texts_come_from_the_heads_training_record(tmp_path: Path) -> None:
    assert held_out_beginnings(tmp_path, 2) == []
    record = {"python": "3.11.0", "held_out": ["gone.py", "argparse.py", "ast.py", "bdb.py"]}
    (tmp_path / "training.json").write_text(json.dumps(record))
    texts = held_out_beginnings(tmp_path, 2)
    library = Path(sysconfig.get_path("stdlib"))
    assert [len(text) for text in texts] == [600, 600]
    assert (library / "ast.py").read_text(encoding="utf-8").startswith(texts[1])
