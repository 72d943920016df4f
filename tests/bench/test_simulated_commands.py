"""A simulated run that can't keep the times of its profile fails, and what can't be simulated is refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, worker_module
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.messages import WorkerNote
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import WORKER_MODULES_VARIABLE, WorkerLink
from tests.system.links import FakeLink
from tests.tiny import VOCAB_SIZE, Pair
from tools.simulation import drafter
from tools.simulation.environment import report_too_slow, simulated_machine, take_options
from tools.simulation.profile import PROFILES, TIMES_NOT_KEPT, Profile
from tools.simulation.target import load_worker

PROFILE = PROFILES / "verify-40ms.json"
NAME = Profile.read(PROFILE).name
SCRIPT = {"texts": [[1, 2, 3]], "acceptance": [0.5], "bonus_ranks": [], "vocab_size": VOCAB_SIZE}


class RecordingLink:
    """A worker's link that records the notes that are sent."""

    name = "target-0"

    def __init__(self) -> None:
        self.sent: list[WorkerNote] = []

    def send(self, message: WorkerNote) -> None:
        self.sent.append(message)


def report_late_worker() -> RecordingLink:
    link = RecordingLink()
    report_too_slow(cast(WorkerLink, link), f"{TIMES_NOT_KEPT}: 30 ms late")
    return link


def test_run_that_missed_the_times_of_its_profile_fails() -> None:
    failed = f"the simulation failed: target-0: {TIMES_NOT_KEPT}: 30"
    with pytest.raises(WorkerError, match=failed), simulated_machine(PROFILE):
        assert report_late_worker().sent == [WorkerNote(f"{TIMES_NOT_KEPT}: 30 ms late")]
    with simulated_machine(PROFILE) as check:
        check()
        report_late_worker()
        with pytest.raises(WorkerError, match=failed):
            check()
        check()


def test_late_worker_of_another_server_reports_to_its_requests_only() -> None:
    assert report_late_worker().sent


def test_workers_get_their_options_and_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with simulated_machine(PROFILE, script):
        module, *given = worker_module("draft")
        assert module == "tools.simulation.drafter" and worker_module("target") == [
            "tools.simulation.target",
            *given[:2],
        ]
        assert worker_module("prefill") == ["outrider.prefill_worker"]
    assert WORKER_MODULES_VARIABLE not in os.environ
    monkeypatch.setattr(sys, "argv", ["worker", *given, "--name", "draft-0", "--model", "m"])
    options = take_options()
    assert (options.profile, options.script) == (PROFILE, script)
    assert sys.argv == ["worker", "--name", "draft-0", "--model", "m"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda folder: simulated_machine(folder / "none"), r"profile .*none can't be read"),
        (lambda folder: simulated_machine(PROFILE, folder / "none"), r"replay script .*none can't be used"),
    ],
)
def test_unusable_files_are_refused_before_anything_starts(
    tmp_path: Path, broken: Callable[[Path], object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words), broken(tmp_path):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize(
    "given",
    [{"drafter": [("draft", "d")], "publish_features": None}, {"drafter": [], "publish_features": ("eagle3", "h")}],
)
def test_target_that_drafts_or_feeds_a_head_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="heads and colocate can't be simulated"):
        load_worker(PROFILE, argparse.Namespace(**given), None, cast(WorkerLink, RecordingLink()))


def test_cluster_runs_the_workers_of_the_profile(random_pair: Callable[..., Pair]) -> None:
    pair = random_pair()
    with (
        suppress(WorkerError),  # raised at the end if this machine is too busy to keep the times
        simulated_machine(PROFILE),
        LocalCluster(model=pair.target, draft_model=pair.draft, memory=False) as cluster,
    ):
        client = cluster.client()
        result = client.generate("def f(", SamplingParams(max_tokens=8, ignore_eos=True), mode="ssd")
        workers = {worker.role: worker for worker in client.stats().workers}
    assert len(result.token_ids) == 8
    assert f"simulating {NAME}" in workers["target"].note
    assert workers["draft"].backend == f"mlx, simulating {NAME}"


def test_drafter_with_a_script_replays_its_texts(tmp_path: Path) -> None:
    """It needs no model, although the server names one, and reports the script as its model."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    own = argparse.Namespace(profile=PROFILE, script=script)
    options = argparse.Namespace(name="draft-0", model="/none", target="", vocabulary="", fan_out="best-first")
    link = FakeLink("draft-0")
    link.incarnation = 3  # type: ignore[attr-defined]
    hello, worker = drafter.load_worker(own, options, cast(WorkerLink, link))
    assert (hello.backend, hello.model) == (f"replay, simulating {NAME}", str(script))
    assert hello.vocab_size == VOCAB_SIZE
    tree = worker._drafter.open([1], SamplingParams())
    assert tree.candidates([tree.root], 1)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.simulation", *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=200)


def test_command_and_its_arguments_follow_the_profile() -> None:
    ran = run_command(str(PROFILE), "--", "pairs")
    assert ran.returncode == 0 and "smollm2" in ran.stdout


def test_missing_profile_is_refused_in_a_sentence() -> None:
    ran = run_command("/no/such.json", "--", "serve")
    assert ran.returncode == InvalidRequest.exit_code
    assert ran.stderr == "python -m tools.simulation: profile /no/such.json can't be read: No such file or directory\n"
