"""`outrider convert`: output, exit codes, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.drafters.coreml.package import open_package
from outrider.orchestrator.cli import main
from tests.coreml.conftest import SIZES

WATCHED = """
import sys
from outrider.orchestrator.cli import main
try:
    raise SystemExit(main())
finally:
    if {"torch", "tensorflow"} & set(sys.modules):
        raise RuntimeError("torch or tensorflow was imported")
"""
"""The program `outrider`, which fails at its end if it has imported torch or tensorflow."""


def test_one_model_makes_one_package_without_torch_or_tensorflow(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen2", **{**SIZES, "num_hidden_layers": 1})
    out = tmp_path / "deep" / "package"
    line = ["convert", "--model", str(model), "--out", str(out), "--context", "64",
            "--weights", "int8"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *line], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["package"] == str(out) and report["weights"] == "int8"
    assert report["functions"] == ["q1", "q8", "q16", "q32", "prefill64"] and report["bytes"] > report["parameters"] > 0
    assert done.stderr == "", "no progress without a terminal, and nothing of coremltools'"
    package = open_package(out, source=model)
    assert package.layout.context == 64 and package.manifest.versions["coremltools"]
    assert set(out.parent.iterdir()) == {out}


def test_invalid_input_is_one_error_line_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and "a Hugging Face id such as org/name" in printed.err
    assert main(["convert", "--model", "tiny", "--out", str(tmp_path / "out"), "--context", "3"]) == 2
    assert "context is 3" in capsys.readouterr().err
