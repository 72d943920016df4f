"""Runs a command of `outrider` on a simulated machine.

    python -m tools.simulation tools/simulation/profiles/mac-8b-cores.json -- overlap --model M --draft-model D

The workers do their work and then wait until the profile's time has passed (docs/simulation.md). Fails after the
command if they took longer. With `--replay` the drafter replays the texts of a script, as often right as the profile
says; a draft model is named, but not loaded. `bench` runs no other engines, unless it has --peers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.orchestrator.cli import main, run_as_program
from tools.simulation.environment import simulated_machine


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="latency profile")
    parser.add_argument("--replay", type=Path, metavar="SCRIPT", help="the texts that the drafter replays")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="a command of outrider and its arguments")


def run(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[0] == "bench" and not any(word.startswith("--peers") for word in command):
        command += ["--peers", "none"]
    with simulated_machine(options.profile, options.replay):
        return main(command)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
