"""The comparison of texts distinguishes equal texts, ties and differences."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from outrider.orchestrator.pairing.model_files import TINY_DRAFT
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Difference, Report
from tests.harness import identity
from tests.harness.default_model import Prompt
from tests.harness.identity import CLUSTERS, Arm, Case, IdentityCheck, table, write_scrambled

CASE = Case(Prompt("code", 0, "x"), (1, 2), SamplingParams(max_tokens=3))
DIFFERENCE = Difference(3, 6, 5, 0.5, 1e-4)


def compare_texts(monkeypatch: pytest.MonkeyPatch, report: Report) -> IdentityCheck:
    monkeypatch.setattr(identity, "certify", lambda *_: report)
    check = IdentityCheck(print)
    check.compare("alone", "T=0", CASE, (4, 5, 6))
    check.compare("same", "T=0", CASE, (4, 5, 6))
    check.compare("other", "T=0", CASE, (4, 6, 6))
    return check


def test_later_texts_are_compared_with_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = compare_texts(monkeypatch, Report(3, 3, (), (), 1024))
    assert [judge.tallies[row, "T=0"].same for row in ("alone", "same", "other")] == [1, 1, 0]


def test_a_difference_within_rounding_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = compare_texts(monkeypatch, Report(3, 2, (DIFFERENCE,), (), 1024))
    assert judge.tallies["other", "T=0"].ties == 1
    assert "1 by a tie" in table(judge)


def test_a_difference_beyond_rounding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = compare_texts(monkeypatch, Report(3, 2, (), (DIFFERENCE,), 1024))
    assert len(judge.tallies["other", "T=0"].different) == 1
    assert "1 DIFFERENT" in table(judge)


def test_every_configuration_has_valid_settings() -> None:
    assert CLUSTERS["best-first"][1][0] == Arm("ar")
    assert all(ServeSettings(**settings) for settings, _ in CLUSTERS.values())


def test_scrambled_model_keeps_its_values_in_another_order(tmp_path) -> None:
    before = load_file(TINY_DRAFT / "model.safetensors")
    after = load_file(write_scrambled(TINY_DRAFT, tmp_path / "draft") / "model.safetensors")
    assert before.keys() == after.keys()
    assert (tmp_path / "draft" / "config.json").exists()
    for name, value in before.items():
        assert np.array_equal(np.sort(value, axis=None), np.sort(after[name], axis=None))
        assert value.ndim < 2 or not np.array_equal(value, after[name])
