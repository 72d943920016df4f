"""Bench and tune refuse invalid input with one sentence before anything starts, and leave no partial profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.bench.commands import tune
from outrider.orchestrator.cli import main
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.version import install_command

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def forbid_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails a test whose command starts processes instead of refusing its input."""

    def started(*_: Any, **__: Any) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr("outrider.bench.comparison.runners.LocalCluster", started)
    monkeypatch.setattr(tune, "LocalCluster", started)
    monkeypatch.setattr("outrider.bench.commands.overlap.LocalCluster", started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def exit_code_and_error(captured: Captured, *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    found = captured.readouterr()
    assert found.out == ""
    assert len(found.err.strip().splitlines()) == 1
    return code, found.err.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "0"], "prompts is 0; expected 1 to 25: the class code has 26"),
        (["--prompts", "999"], "prompts is 999; expected 1 to 25: the class code has 26"),
        (["--classes", "poems"], "unknown class 'poems'; expected one of code, json, prose, repeated"),
        (["--classes", ""], "unknown class ''"),
        (["--depths", "0"], "num_draft_tokens is 0; expected a whole number from 1 to 32"),
        (["--depths", "two"], "depths is 'two'; expected comma-separated numbers"),
        (["--temps", "hot"], "temps is 'hot'; expected comma-separated numbers"),
        (["--temps=-1"], "temp is -1.0"),
        (["--suite", "--prompts", "20"], "prompts is 20; expected 1 to 19: the class chat has 20"),
        (["--suite", "--classes", "poems"], "expected one of chat, code, math, summary, extraction, editing"),
        (["--suite", "nowhere"], "nowhere has no prompts; expected files like chat.txt"),
        (["--max-tokens", "1"], "max_tokens is 1; expected a whole number from 2"),
        (["--draft-backend", "none"], "bench compares drafters, and draft_backend is none; choose another one"),
    ],
)
def test_invalid_bench_arguments_are_refused(capsys: Captured, arguments: list[str], words: str) -> None:
    code, message = exit_code_and_error(capsys, "bench", *arguments)
    assert code == InvalidRequest.exit_code
    assert message.startswith("outrider bench: ")
    assert words in message


def test_unwritable_out_path_is_refused_before_the_bench_starts(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, message = exit_code_and_error(capsys, "bench", "--prompts", "1", "--out", str(tmp_path / "file" / "out"))
    assert code == InvalidRequest.exit_code
    assert "nothing can be written to" in message
    assert "choose another --out" in message


def test_a_peer_that_is_not_installed_is_named(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.comparison.peers.find_spec", lambda name: None)
    code, message = exit_code_and_error(capsys, "bench", "--prompts", "1", "--peers", "mlx-lm")
    assert (code, message) == (
        InvalidRequest.exit_code,
        f"outrider bench: mlx-lm is left out: mlx_lm is not installed; run {install_command('bench')}",
    )


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ("llama.cpp", "llama.cpp is left out: it reads GGUF files; expected --model FILE.gguf"),
        ("vllm", "peers is 'vllm'; expected none, or comma-separated names of mlx-lm, llama.cpp"),
        ("", "peers is ''; expected none, or comma-separated names of mlx-lm, llama.cpp"),
    ],
)
def test_unusable_or_unknown_peers_are_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, peers: str, words: str
) -> None:
    monkeypatch.setattr("outrider.bench.comparison.peers.find_spec", lambda name: True)
    code, message = exit_code_and_error(capsys, "bench", "--prompts", "1", "--peers", peers)
    assert code == InvalidRequest.exit_code
    assert words in message


@pytest.mark.parametrize("wanted", [(), ("--peers", "none")])
def test_bench_without_peers_needs_no_peer_installed(monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]) -> None:
    monkeypatch.setattr("outrider.bench.comparison.peers.find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="processes were started"):
        main(["bench", "--prompts", "1", *wanted])


def test_invalid_overlap_arguments_are_refused_before_measuring(capsys: Captured) -> None:
    words = "temp is -1.0; expected a number from 0 to 100"
    assert exit_code_and_error(capsys, "overlap", "--temp=-1") == (2, f"outrider overlap: {words}")


@pytest.mark.parametrize("command", ["tune", "overlap"])
@pytest.mark.parametrize("arguments", [("--draft-backend", "none"), ("--model", str(TINY_TARGET))])
def test_measuring_drafts_without_a_draft_model_is_refused(
    capsys: Captured, command: str, arguments: tuple[str, str]
) -> None:
    code, message = exit_code_and_error(capsys, command, *arguments)
    assert code == InvalidRequest.exit_code
    assert f"{command} needs a draft model; expected --draft-model, and a --draft-backend that uses it" in message


def test_tune_with_a_missing_model_is_a_model_error(capsys: Captured) -> None:
    assert exit_code_and_error(capsys, "tune", "--model", "/no/such")[0] == ModelError.exit_code


def test_tune_with_an_unwritable_cache_is_refused_before_measuring(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    code, message = exit_code_and_error(capsys, "tune")
    assert code == InvalidRequest.exit_code
    assert "nothing can be written to" in message
    assert "set OUTRIDER_CACHE" in message


def test_interrupted_tune_saves_nothing(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "_measure_arms", interrupt)
    assert main(["tune"]) == 130
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert "tune: interrupted; nothing was saved" in capsys.readouterr().err


def test_interrupted_save_keeps_the_previous_tuning_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Tuning(10.0, ((1, 10.5),), 3.5, 1.9, 0.3, 0.4, (0.8,), 0.85, (TunedArm("ar", 0, 0, 95.0),))
    tuning.save(record, tmp_path / "tuning.json")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuning.save(Tuning(99.0, ((1, 1.0),), 1.0, 1.0, 1.0, 1.0, (0.1,), 0.1, ()), tmp_path / "tuning.json")
    assert tuning.load(tmp_path / "tuning.json") == (record,)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tuning.json"]
    assert not list(tmp_path.glob(".tuning*"))
