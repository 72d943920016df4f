"""Evaluating a pair: the estimates match their definitions, and bad input is refused in one sentence."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import evaluate
from models.evaluate import compare, measure_window, windows

MODELS = Path(__file__).resolve().parents[2] / "models"


class Fixed:
    """A model with the same log-probabilities at every position."""

    def __init__(self, probabilities: list[float]) -> None:
        self.logits = mx.array(np.log(probabilities), dtype=mx.float32) + 3.0

    def __call__(self, tokens: Any) -> Any:
        return mx.broadcast_to(self.logits, (*tokens.shape, self.logits.shape[0]))


def test_estimates_match_their_definitions() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    loss_p, loss_q, agreement, overlap, cold = measure_window(Fixed(list(p)), Fixed(list(q)), [0, 1, 0, 2], [1.0, 0.5])
    assert loss_p == pytest.approx(-np.log(p[[1, 0, 2]]).mean(), abs=1e-5)
    assert loss_q == pytest.approx(-np.log(q[[1, 0, 2]]).mean(), abs=1e-5)
    assert agreement == 0
    assert overlap == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)
    squared_p, squared_q = p**2 / (p**2).sum(), q**2 / (q**2).sum()
    assert cold == pytest.approx(np.minimum(squared_p, squared_q).sum(), abs=1e-5)


def test_model_agrees_with_its_padded_copy() -> None:
    small, padded = Fixed([0.5, 0.3, 0.2]), Fixed([0.5, 0.3, 0.2, 1e-9])
    comparison = compare(small, padded, [[0, 1, 2, 1]], length=2, limit=100, temps=[1.0])
    assert comparison.agreement.mean == 1
    assert comparison.overlaps[0].mean == pytest.approx(1, abs=1e-5)


def test_means_weigh_tokens_not_windows() -> None:
    model = Fixed([0.5, 0.25, 0.25])
    comparison = compare(model, model, [[0, 0, 0, 0, 0], [0, 1]], length=4, limit=100, temps=[])
    assert comparison.tokens == 5
    assert comparison.target_loss.mean == pytest.approx((4 * np.log(2) + np.log(4)) / 5, abs=1e-5)


def test_windows_cover_a_document_and_never_cross_into_the_next() -> None:
    found = list(windows([list(range(10)), [50, 51], list(range(20, 25))], 4))
    assert found == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [50, 51], [20, 21, 22, 23, 24]]


def test_reading_stops_at_the_limit() -> None:
    model = Fixed([0.5, 0.5])
    assert compare(model, model, [[0] * 100], length=10, limit=25, temps=[]).tokens == 30


def test_the_tiny_pair_predicts_its_own_language(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\n\n\ndef main(path):\n    return os.path.join(path, 'a')\n" * 2)
    assert evaluate.main(["--text", str(text), "--tokens", "50", "--temp", "1"]) == 0
    rows = {line[:28].strip(): float(line[28:].split()[0]) for line in capsys.readouterr().out.splitlines()[1:]}
    assert 0 < rows["target loss, nats per token"] < 5
    assert 0.2 < rows["sum min(p, q) at T = 1"] <= 1


def test_a_pair_with_a_record_is_read_on_its_held_out_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"python": platform.python_version(), "held_out": ["bisect.py"]}
    (tmp_path / "training.json").write_text(json.dumps(record))
    roles = ["--target", str(MODELS / "target"), "--draft", str(MODELS / "draft")]
    assert evaluate.main(["--pair", str(tmp_path), *roles, "--tokens", "8", "--context", "8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("8 tokens") and "nan" not in said  # one window has no standard error


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (None, "no training.json"),
        ({"python": "2.7.18", "held_out": ["bisect.py"]}, "those of Python 2.7.18"),
        ({"python": platform.python_version(), "held_out": ["gone.py"]}, "can't read .*gone.py"),
        ({"python": platform.python_version()}, "not the record"),
    ],
)
def test_unusable_record_is_a_one_line_error(
    record: dict[str, object] | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if record is not None:
        (tmp_path / "training.json").write_text(json.dumps(record))
    assert evaluate.main(["--pair", str(tmp_path)]) == 2
    check_sentence(capsys, sentence)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--text", "/nowhere.py"], 2, "can't read /nowhere.py"),
        (["--text", __file__, "--pair", "/nowhere"], 3, "/nowhere/target has no config.json"),
        (["--text", __file__, "--temp", "0"], 2, "above 0"),
        (["--text", __file__, "--temp", "nan"], 2, "above 0"),
        (["--text", "/dev/null"], 2, "/dev/null has too little text"),
        (["--text", __file__, "--tokens", "0"], 2, "--tokens"),
        (["--text", __file__, "--context", "1"], 2, "--context"),
    ],
)
def test_invalid_input_is_a_one_line_error(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(arguments) == code
    check_sentence(capsys, sentence)


def check_sentence(capsys: pytest.CaptureFixture[str], sentence: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(sentence, captured.err)
