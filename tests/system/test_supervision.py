"""Real processes are killed and stopped in the middle of texts, and no token changes."""

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
from tests.harness.faults import STARTED, Faults
from tests.harness.random_identity import DIFFERENT
from tests.harness.soak import settled
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
    """Its target is the model under test, whose tokens the harness takes and through which it replays texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL, str(served.target))
        with LocalCluster(model=served.target, draft_model=served.draft, worker_timeout=2, max_active=4) as running:
            yield running


def worker(client: Client, role: str) -> WorkerStats:
    return next(worker for worker in client.stats().workers if worker.role == role)


def until_ready(client: Client) -> None:
    deadline = time.monotonic() + LIMIT
    while {worker.state for worker in client.stats().workers if worker.name in STARTED} != {"ready"}:
        if time.monotonic() > deadline:
            pytest.fail(f"not all came back: {client.stats().workers}")
        time.sleep(0.02)


def disturbed(
    cluster: LocalCluster, samplings: Sequence[SamplingParams], mode: str, role: str, number: signal.Signals
) -> list[GenerationResult]:
    """These at once; the worker is hit when each has said something, so in the middle of all."""
    client, results = cluster.client(timeout=LIMIT), dict[int, GenerationResult]()
    begun = threading.Barrier(len(samplings) + 1)

    def ask(place: int) -> None:
        stream = client.stream(PROMPT, samplings[place], mode=mode)
        for count, _ in enumerate(stream):
            if count == 3:
                begun.wait(LIMIT)
        results[place] = stream.result

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(samplings))]
    for thread in threads:
        thread.start()
    begun.wait(LIMIT)
    os.kill(worker(client, role).pid, number)
    for thread in threads:
        thread.join(LIMIT)
    until_ready(client)
    return [results[place] for place in range(len(samplings))]


def hit_in_the_middle(
    cluster: LocalCluster, samplings: Sequence[SamplingParams], mode: str, role: str, counts: str
) -> list[GenerationResult]:
    """The same where this of the timings says that each was hit; asked again where one was over before that."""
    for _ in range(TRIES):
        results = disturbed(cluster, samplings, mode, role, signal.SIGKILL)
        if all(getattr(result.timings, counts) for result in results):
            return results
    pytest.fail(f"{counts} is 0 of one text in each of {TRIES} tries")


def undisturbed(client: Client, samplings: Sequence[SamplingParams]) -> list[GenerationResult]:
    """The target's own texts, at once."""
    with ThreadPoolExecutor(len(samplings)) as threads:
        return list(threads.map(lambda sampling: client.generate(PROMPT, sampling, mode="ar"), samplings))


@pytest.fixture(scope="module")
def whole(cluster: LocalCluster) -> dict[str, GenerationResult]:
    return dict(zip(TEXTS, undisturbed(cluster.client(), list(TEXTS.values())), strict=True))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system tells of no other process's libraries")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_workers_do_not_load_the_tokenizers_library(cluster: LocalCluster, role: str) -> None:
    """Its start takes no part in what mlx-lm has for tokenizers."""
    maps = Path(f"/proc/{worker(cluster.client(), role).pid}/maps").read_text()
    assert "/mlx/" in maps and "/tokenizers/" not in maps


def test_killed_drafter_rejoins_the_running_text(cluster: LocalCluster) -> None:
    client, before = cluster.client(timeout=LIMIT), worker(cluster.client(), "draft").restarts
    long = replace(SAMPLED, max_tokens=450)
    stream = client.stream(PROMPT, long, mode="ssd")
    chunks = iter(stream)
    # The text outlasts a drafter's start, and the target answers between two of its breaks on a slow machine, too.
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
    cluster: LocalCluster, whole: dict[str, GenerationResult]
) -> None:
    results = hit_in_the_middle(cluster, list(TEXTS.values()), "ssd", "target", "resumed")
    for name, result in zip(TEXTS, results, strict=True):
        assert result.token_ids == whole[name].token_ids, name
        assert result.text == whole[name].text and result.finish_reason == whole[name].finish_reason
        assert any("after a pause" in note for note in result.notes)
    told = [[one.logprob for one in run.logprobs or ()] for run in (results[2], whole["logprobs"])]
    assert told[0] == pytest.approx(told[1], abs=1e-3) and len(told[0]) == LENGTH


@pytest.mark.parametrize("role", ["target", "draft"])
def test_frozen_worker_is_replaced(cluster: LocalCluster, whole: dict[str, GenerationResult], role: str) -> None:
    before = worker(cluster.client(), role).pid
    results = disturbed(cluster, list(TEXTS.values()), "ssd", role, signal.SIGSTOP)
    assert [result.token_ids for result in results] == [result.token_ids for result in whole.values()]
    while worker(cluster.client(), role).pid == before:  # a text may end before its drafter is given up
        time.sleep(0.05)
    until_ready(cluster.client())
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)  # nobody is started while something of the one before is left


def test_request_without_a_target_waits_for_its_replacement(
    cluster: LocalCluster, whole: dict[str, GenerationResult]
) -> None:
    client = cluster.client()
    os.kill(worker(client, "target").pid, signal.SIGKILL)
    assert client.generate(PROMPT, TEXTS["greedy"]).token_ids == whole["greedy"].token_ids


def test_load_with_faults_changes_no_text(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers are killed at once; then strangers send garbage, and clients leave."""
    monkeypatch.setattr(harness_faults, "FRAMES", 100)  # texts are asked for as long as the faults last
    monkeypatch.setattr(harness_faults, "CLIENTS", 8)
    client = cluster.client(timeout=LIMIT)
    load, faults = Load(client, 4, 0, cancels=True), Faults(cluster, random.Random("for a moment"))
    with load.running():
        Strike(("draft", "target"), signal.SIGKILL, 8).inject(client, load.growth)
        faults._workers_garbage()
        faults._a_malicious_drafter_joins()
        faults._clients_garbage()
        faults._clients_vanish()
    until_ready(client)
    assert not load.failed and len(load.found) >= AT_ONCE
    assert not [one for one in load.found if one.verdict == DIFFERENT]
    assert settled(cluster).kv.reserved == 0


def test_joined_drafter_that_was_lost_joins_again(cluster: LocalCluster, served: Pair) -> None:
    client, workers = cluster.client(), f"{cluster.endpoint.rpartition('/')[0]}/workers"

    def until_it_is(state: str) -> None:
        deadline = time.monotonic() + LIMIT
        while [one.state for one in client.stats().workers if one.name == "studio"] != [state]:
            assert time.monotonic() < deadline, client.stats().workers
            time.sleep(0.05)

    model = ("--draft-model", str(served.draft))
    command = python("-m", "outrider", "worker", "draft", "--connect", workers, "--name", "studio", *model)
    with subprocess.Popen(command, env=child_environment(), stderr=subprocess.DEVNULL) as studio:
        try:
            until_it_is("ready")
            studio.send_signal(signal.SIGSTOP)
            until_it_is("lost")
            studio.send_signal(signal.SIGCONT)
            until_it_is("ready")
            while not client.generate(PROMPT, GREEDY, mode="ssd").timings.draft_n_accepted:
                pass
        finally:
            studio.kill()
    until_it_is("lost")


def test_target_that_cannot_restart_fails_its_request_with_the_reason(served: Pair, tmp_path: Path) -> None:
    model = tmp_path / "target"
    shutil.copytree(served.target, model)
    # Whoever asked is told; the cluster's own end is then no error of its own.
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
