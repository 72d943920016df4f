"""Shows this machine's chip, memory, libraries and BLAS, and the cost of drafting with each library and device."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import MODELS_ONLY, child_environment, python
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest, WorkerError

REPORT_MODULE = "outrider.drafters.coreml.doctor"
GIBIBYTE = 2**30


def add_flags(parser: argparse.ArgumentParser) -> None:
    drafting = "the draft model to time (default: the default model's)"
    parser.add_argument("--draft-model", metavar="ID|PATH", help=drafting)
    trial = "convert the draft model and try Core ML, which can take minutes"
    parser.add_argument("--probe", action="store_true", help=trial)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    flags.add_setting(parser.add_argument, "log_level")


def run(options: argparse.Namespace) -> int:
    """Prints the report of `REPORT_MODULE`, which is run as a separate process because it imports MLX."""
    flags.set_up_logging(options)
    system.require_mlx()
    screen = Screen()
    screen.show("looking at this machine")
    draft = _find_default_draft() if options.draft_model is None else find_model(options.draft_model).folder
    command = python("-m", MODELS_ONLY, REPORT_MODULE, "--model", str(draft), *(["--probe"] if options.probe else []))
    environment = system.blas_environment(child_environment(), 1)
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
    screen.clear()
    if done.returncode != 0:
        raise WorkerError(f"this machine can't be examined: {REPORT_MODULE} ended with code {done.returncode}")
    print(done.stdout.strip() if options.json else _format_report(json.loads(done.stdout)))
    return 0


def _find_default_draft() -> Path:
    """Returns the default model's draft."""
    if (draft := choose_pair(ServeSettings()).draft) is None:
        raise InvalidRequest(f"no draft model comes with {default_model()[0]}; expected --draft-model")
    return draft.folder


def _format_report(report: dict[str, Any]) -> str:
    machine = report["machine"]
    wired = f"{machine['wired_budget_bytes'] / GIBIBYTE:.0f} GiB" if machine["wired_budget_bytes"] else "none"
    rows = [
        ("chip", f"{machine['chip']}, {machine['cores']} cores, {machine['architecture']}"),
        ("memory", f"{machine['memory_bytes'] / GIBIBYTE:.0f} GiB, wired budget {wired}"),
        ("system", f"{machine['system']} {machine['build']}, Python {machine['python']}"),
        ("libraries", ", ".join(f"{name} {number}" for name, number in machine["libraries"].items())),
        ("MLX runs on", machine["mlx_device"]),
        ("BLAS", _describe_blas()),
    ]
    lines = [f"{name:12} {value}" for name, value in rows]
    lines += ["", f"drafting with {report['model']}: milliseconds for 1 token, and for 8 tokens at once"]
    return "\n".join([*lines, *map(_format_placement, report["placements"])])


def _describe_blas() -> str:
    """Describes the BLAS of models that MLX computes on the CPU."""
    if not system.needs_openblas():
        return "Accelerate"
    return system.find_openblas() or "MLX's own, which is slow (docs/install.md)"


def _format_placement(place: dict[str, Any]) -> str:
    share = place["engine_share"]
    engine = "" if share is None else f", {share:.0%} on the Neural Engine"
    note = f"   {place['note']}" if place["note"] else ""
    state = f"{_ms(place['one_ms']):>8} {_ms(place['eight_ms']):>8}" if place["usable"] else f"{'no':>8} {'':8}"
    return f"  {place['name']:38} {state}{engine}{note}"


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"
