"""The replay drafter errs as its script prescribes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tools.simulation.replay import ReplayDrafter, Script

PROMPT = (1, 2, 3)
TEXT = PROMPT + tuple(random.Random(1).randrange(1, 300) for _ in range(6000))


def test_acceptance_by_position_and_bonus_rank_follow_the_script() -> None:
    drafter = ReplayDrafter(Script((TEXT,), (0.9, 0.6), (0.5, 0.25), 300))
    accepted, tried, ranks = [0, 0], [0, 0], [0, 0, 0]
    tree = drafter.open(PROMPT, SamplingParams())
    for position in range(len(PROMPT), 5000):
        first = tree.best([tree.root])[0]
        tried[0] += 1
        accepted[0] += first == TEXT[position]
        if first == TEXT[position]:
            node = tree.feed([tree.root], [None])
            tried[1] += 1
            accepted[1] += tree.best(node)[0] == TEXT[position + 1]
        else:
            others = [c.token for c in tree.candidates([tree.root], 4)[0]][1:]
            ranks[others.index(TEXT[position]) if TEXT[position] in others else 2] += 1
        tree.commit(tree.feed([tree.root], [TEXT[position]]))
    assert abs(accepted[0] / tried[0] - 0.9) < 0.02
    assert abs(accepted[1] / tried[1] - 0.6) < 0.03
    assert abs(ranks[0] / sum(ranks) - 0.5) < 0.07
    assert abs(ranks[1] / sum(ranks) - 0.25) < 0.07


def test_a_script_is_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    fields = {"texts": [[1, 2]], "acceptance": [0.5], "bonus_ranks": [], "vocab_size": 100}
    path.write_text(json.dumps(fields))
    assert Script.read(path) == Script([(1, 2)], (0.5,), (), 100)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"texts": 3}', '{"texts": [], "acceptance": [2.0], "bonus_ranks": [], "vocab_size": 100}'],
)
def test_invalid_script_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="replay script"):
        Script.read(path)


def test_missing_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.json"):
        Script.read(tmp_path / "none.json")
