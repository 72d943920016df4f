"""Real workers are killed and suspended in the middle of texts, and no token changes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import Client, GenerationResult, Grammar, LocalCluster, SamplingParams
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.model_files import MODEL_VARIABLE as MODEL
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import WorkerStats
from tests.harness import faults as harness_faults
from tests.harness.chaos import AT_ONCE, Load, Strike
from tests.harness.faults import STARTED_WORKERS, Faults
from tests.harness.random_identity import DIFFERENT
from tests.harness.soak import wait_until_idle
from tests.suspend import suspended_text, throttled
from tests.tiny import Pair

LIMIT, TRIES = 200.0, 20
PROMPT = "def fibonacci(n):"
LENGTH = 64
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SAMPLED = replace(GREEDY, temp=0.8, seed=5)
TEXTS = {
    "greedy": GREEDY,
    "sampled": replace(SAMPLED, top_p=0.95, repetition_penalty=1.1),
    "logprobs": replace(SAMPLED, seed=6, logprobs=2, presence_penalty=0.3),
    "grammar": SamplingParams(max_tokens=LENGTH, temp=0.8, seed=7, grammar=Grammar("regex", "(ab|cd|[0-9]{3}){40,90}")),
}


@pytest.fixture(scope="module")
def cluster(served: Pair) -> Iterator[LocalCluster]:
    """A cluster whose target is also the harness's model under test, for its prompts and for replaying texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL, str(served.target))
        with LocalCluster(model=served.target, draft_model=served.draft, worker_timeout=2, max_active=4) as running:
            yield running


def worker(client: Client, role: str) -> WorkerStats:
    return next(worker for worker in client.stats().workers if worker.role == role)


def wait_until_ready(client: Client) -> None:
    deadline = time.monotonic() + LIMIT
    while {worker.state for worker in client.stats().workers if worker.name in STARTED_WORKERS} != {"ready"}:
        if time.monotonic() > deadline:
            pytest.fail(f"not all came back: {client.stats().workers}")
        time.sleep(0.02)


def run_with_signal(
    cluster: LocalCluster, samplings: Sequence[SamplingParams], mode: str, role: str, number: signal.Signals
) -> list[GenerationResult]:
    """Runs requests concurrently, and sends a signal to the worker with this role in the middle of all their texts."""
    client, results = cluster.client(timeout=LIMIT), dict[int, GenerationResult]()
    all_started = threading.Barrier(len(samplings) + 1)

    def ask(index: int) -> None:
        stream = client.stream(PROMPT, samplings[index], mode=mode)
        for count, _ in enumerate(stream):
            if count == 3:
                all_started.wait(LIMIT)
        results[index] = stream.result

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(samplings))]
    for thread in threads:
        thread.start()
    all_started.wait(LIMIT)
    os.kill(worker(client, role).pid, number)
    for thread in threads:
        thread.join(LIMIT)
    wait_until_ready(client)
    return [results[index] for index in range(len(samplings))]


def kill_mid_text(
    cluster: LocalCluster, samplings: Sequence[SamplingParams], mode: str, role: str, counts: str
) -> list[GenerationResult]:
    """Kills the worker in the middle of all texts. Tries again until `counts`, a field of timings, confirms it."""
    for _ in range(TRIES):
        results = run_with_signal(cluster, samplings, mode, role, signal.SIGKILL)
        if all(getattr(result.timings, counts) for result in results):
            return results
    pytest.fail(f"{counts} is 0 of one text in each of {TRIES} tries")


def run_plain(client: Client, samplings: Sequence[SamplingParams]) -> list[GenerationResult]:
    """Runs requests concurrently without drafts and without faults."""
    with ThreadPoolExecutor(len(samplings)) as threads:
        return list(threads.map(lambda sampling: client.generate(PROMPT, sampling, mode="ar"), samplings))


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> dict[str, GenerationResult]:
    return dict(zip(TEXTS, run_plain(cluster.client(), list(TEXTS.values())), strict=True))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/PID/maps")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_workers_do_not_load_the_tokenizers_library(cluster: LocalCluster, role: str) -> None:
    """Importing mlx-lm's tokenizer code would make workers start more slowly."""
    maps = Path(f"/proc/{worker(cluster.client(), role).pid}/maps").read_text()
    assert "/mlx/" in maps and "/tokenizers/" not in maps


def test_killed_drafter_rejoins_the_running_text(cluster: LocalCluster) -> None:
    client, before = cluster.client(timeout=LIMIT), worker(cluster.client(), "draft").restarts
    long = replace(SAMPLED, max_tokens=450)
    stream = client.stream(PROMPT, long, mode="ssd")
    chunks = iter(stream)
    # So slow that the text outlasts the drafter's restart, but the target still answers on a slow machine.
    with throttled(worker(client, "target").pid, suspended_s=0.6, running_s=0.05):
        next(chunks)
        os.kill(worker(client, "draft").pid, signal.SIGKILL)
        while (draft := worker(client, "draft")).restarts == before or draft.state != "ready":
            next(chunks)
    for _ in chunks:
        pass
    result = stream.result
    assert result.timings.rejoined
    assert "speculation: draft-0 drafts again" in result.notes
    assert any("draft worker draft-0 ended with code -9" in note for note in result.notes)
    assert result.token_ids == client.generate(PROMPT, long, mode="ar").token_ids


def test_texts_continue_unchanged_when_the_target_is_killed(
    cluster: LocalCluster, expected: dict[str, GenerationResult]
) -> None:
    results = kill_mid_text(cluster, list(TEXTS.values()), "ssd", "target", "resumed")
    for name, result in zip(TEXTS, results, strict=True):
        assert result.token_ids == expected[name].token_ids, name
        assert result.text == expected[name].text and result.finish_reason == expected[name].finish_reason
        assert any("after a pause" in note for note in result.notes)
    logprobs = [[one.logprob for one in run.logprobs or ()] for run in (results[2], expected["logprobs"])]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3) and len(logprobs[0]) == LENGTH


@pytest.mark.parametrize("role", ["target", "draft"])
def test_frozen_worker_is_replaced(cluster: LocalCluster, expected: dict[str, GenerationResult], role: str) -> None:
    before = worker(cluster.client(), role).pid
    results = run_with_signal(cluster, list(TEXTS.values()), "ssd", role, signal.SIGSTOP)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected.values()]
    while worker(cluster.client(), role).pid == before:  # a text may end before its drafter is replaced
        time.sleep(0.05)
    wait_until_ready(cluster.client())
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)  # a worker is only started after its predecessor has ended


def test_request_without_a_target_waits_for_its_replacement(
    cluster: LocalCluster, expected: dict[str, GenerationResult]
) -> None:
    client = cluster.client()
    os.kill(worker(client, "target").pid, signal.SIGKILL)
    assert client.generate(PROMPT, TEXTS["greedy"]).token_ids == expected["greedy"].token_ids


def test_load_with_faults_changes_no_text(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers are killed at once; then unknown peers send invalid frames, and clients disconnect."""
    monkeypatch.setattr(harness_faults, "FRAMES", 100)  # requests are sent for as long as the faults last
    monkeypatch.setattr(harness_faults, "CLIENTS", 8)
    client = cluster.client(timeout=LIMIT)
    load, faults = Load(client, 4, 0, cancels=True), Faults(cluster, random.Random("for a moment"))
    with load.running():
        Strike(("draft", "target"), signal.SIGKILL, 8).inject(client, load.chunks)
        faults._workers_garbage()
        faults._a_malicious_drafter_joins()
        faults._clients_garbage()
        faults._clients_vanish()
    wait_until_ready(client)
    assert not load.failed and len(load.comparisons) >= AT_ONCE
    assert not [one for one in load.comparisons if one.verdict == DIFFERENT]
    assert wait_until_idle(cluster).kv.reserved == 0


def test_joined_drafter_that_was_lost_joins_again(cluster: LocalCluster, served: Pair) -> None:
    client, workers = cluster.client(), f"{cluster.endpoint.rpartition('/')[0]}/workers"

    def wait_until_state(state: str) -> None:
        deadline = time.monotonic() + LIMIT
        while [one.state for one in client.stats().workers if one.name == "studio"] != [state]:
            assert time.monotonic() < deadline, client.stats().workers
            time.sleep(0.05)

    model = ("--draft-model", str(served.draft))
    command = python("-m", "outrider", "worker", "draft", "--connect", workers, "--name", "studio", *model)
    with subprocess.Popen(command, env=child_environment(), stderr=subprocess.DEVNULL) as studio:
        try:
            wait_until_state("ready")
            studio.send_signal(signal.SIGSTOP)
            wait_until_state("lost")
            studio.send_signal(signal.SIGCONT)
            wait_until_state("ready")
            while not client.generate(PROMPT, GREEDY, mode="ssd").timings.draft_n_accepted:
                pass
        finally:
            studio.kill()
    wait_until_state("lost")


def test_target_that_cannot_restart_fails_its_request_with_the_reason(served: Pair, tmp_path: Path) -> None:
    model = tmp_path / "target"
    shutil.copytree(served.target, model)
    # The request's client gets the error, so the end of the cluster is no other error.
    with LocalCluster(model=str(model), draft_backend="ngram") as running:
        client = running.client()
        with suspended_text(client, lambda: client.stream(PROMPT, replace(SAMPLED, max_tokens=4000))) as (
            _,
            chunks,
        ):
            (model / "model.safetensors").unlink()
            os.kill(worker(client, "target").pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"died 5 times in a row") as error:
                list(chunks)
        assert "model.safetensors" in str(error.value) or "weights" in str(error.value)
