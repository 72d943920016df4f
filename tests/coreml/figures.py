"""Prints the Core ML drafter's figures that need no Mac: `python -m tests.coreml.figures [--convert fp16 int8]`.

Runs the tests that measure them and prints the results. With --convert it also makes a package of Qwen2.5-0.5B's shapes
(random bfloat16 weights) in a process of its own, and prints its time and peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree

from tests.tiny import write_model

ROOT = Path(__file__).parents[2]
QWEN = {
    "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
TESTS = ("test_parity.py", "test_tree.py", "test_prefill.py", "test_acceptance.py", "test_quantize.py",
         "test_census.py", "test_ops.py", "test_end_to_end.py")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.coreml.figures", description=__doc__)
    parser.add_argument("--convert", nargs="*", default=[], choices=["fp16", "int8"])
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    failed = 0 if options.skip_tests else _tests()
    with tempfile.TemporaryDirectory() as directory:
        if options.convert:
            model = Path(directory) / "model"
            # In a process of its own, since the peak memory of a child begins with that of its parent.
            maker = get_context("spawn").Process(target=write_model, args=(model, "qwen2", 0), kwargs=QWEN)
            maker.start()
            maker.join()
            for weights in options.convert:
                _convert(model, Path(directory) / weights, weights)
    return failed


def _tests() -> int:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        tests = [str(ROOT / "tests" / "coreml" / name) for name in TESTS]
        line = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
        done = subprocess.run(line, cwd=ROOT, check=False)
        found: dict[str, list[float]] = defaultdict(list)
        for recorded in ElementTree.parse(report).iter("property"):
            if recorded.attrib["name"].startswith("figure:"):
                found[recorded.attrib["name"].removeprefix("figure:")].append(float(recorded.attrib["value"]))
    for name, values in sorted(found.items()):
        print(f"| {name} | {min(values):.4g} to {max(values):.4g} | {len(values)} |")
    return done.returncode


def _convert(model: Path, out: Path, weights: str) -> None:
    line = [sys.executable, "-m", "outrider", "convert", "--weights", weights]
    started = time.monotonic()
    process = subprocess.Popen([*line, "--model", str(model), "--out", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB here
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    peak = usage.ru_maxrss * scale / 2**30
    print(
        f"| Qwen2.5-0.5B's shapes, {weights}: exit code {process.returncode} | {time.monotonic() - started:.1f} s, "
        f"peak {peak:.2f} GiB, package {size / 2**20:.0f} MiB | 1 |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
