"""The examples of docs/python.md run unchanged, with one cluster."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.orchestrator.pairing.model_files import MODEL_VARIABLE as MODEL
from tests.tiny import Pair

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_examples_of_the_python_page_run(
    capfd: pytest.CaptureFixture[str], served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL, str(served.target))
    names: dict[str, Any] = {}
    try:
        for block in BLOCKS:
            code = compile(block, "docs/python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:  # a notebook's cell
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
    finally:
        if "cluster" in names:
            names["cluster"].close()
    out, err = capfd.readouterr()
    assert "Generation: 40 tokens" in out and "top_p is 2" in out and "no server at" in out
    assert err == ""


def test_python_page_mentions_every_exception() -> None:
    raised = [name for name in outrider.__all__ if isinstance(getattr(outrider, name), type(Exception))]
    errors = [name for name in raised if issubclass(getattr(outrider, name), outrider.OutriderError)]
    assert [name for name in errors if f"`{name}`" not in PAGE] == []


def test_cluster_prints_nothing_when_its_program_raises(capfd: pytest.CaptureFixture[str], served: Pair) -> None:
    alone = {"model": served.target, "draft_backend": "none"}
    with pytest.raises(ValueError, match="its own"), outrider.LocalCluster(**alone) as cluster:
        reading = iter(cluster.client().stream("def f(", max_tokens=900, ignore_eos=True))
        next(reading)
        raise ValueError("its own")
    assert capfd.readouterr().err == ""
