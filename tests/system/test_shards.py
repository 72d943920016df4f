"""A target of two ranks has the same text as one process, and the death of a rank is only a pause."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import GenerationResult, Grammar, LocalCluster, SamplingParams
from outrider.engine.loading import LoadedModel
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.errors import WorkerError
from outrider.protocol.stats import Claim
from outrider.target_worker.certificate import certify
from outrider.target_worker.rank_link import free_ports
from tests.target_worker.heads import markov_llama, write_feature_head, write_recurrent_head
from tests.tiny import Pair

LIMIT = 200.0
PROMPT = "def fibonacci(n):"
LONG_FORM = bool(os.environ.get("OUTRIDER_RANKS"))
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temp=0.8, seed=5, top_p=0.95, repetition_penalty=1.1)
CONSTRAINED = SamplingParams(max_tokens=32, temp=0.8, seed=7, grammar=Grammar("regex", "(ab|cd|[0-9]{3}){40,80}"))
WITH_LOGPROBS = replace(SAMPLED, seed=6, logprobs=2)

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes below /proc")


@pytest.fixture(scope="module")
def cluster(served: Pair) -> Iterator[LocalCluster]:
    pair = {"model": served.target, "draft_model": served.draft}
    with LocalCluster(**pair, shards=2, max_active=4, worker_timeout=4) as running:
        yield running


def check_text(
    served_target: LoadedModel, codec: TextCodec, sampling: SamplingParams, result: GenerationResult
) -> None:
    """Checks that a process with all weights generates each token, except for ties: sums over ranks round otherwise."""
    claim = Claim("", codec.encode(PROMPT), result.token_ids, sampling, tuple(codec.eos))
    report = certify(served_target, claim)
    assert not report.mismatches and report.identical + len(report.ties) == len(result.token_ids) == sampling.max_tokens


def ranks(cluster: LocalCluster) -> list[int]:
    """Returns the process ids of the target's ranks, rank 0 first; [] while the target is not ready."""
    target = next(worker for worker in cluster.client().stats().workers if worker.role == "target")
    if target.state != "ready":
        return []
    return [target.pid, *map(int, Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text().split())]


def wait_until_ready(cluster: LocalCluster) -> list[int]:
    """Waits until the target is ready, and returns the process ids of its ranks."""
    while not (found := ranks(cluster)):
        time.sleep(0.02)
    return found


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} are left behind"
        time.sleep(0.02)


def test_two_ranks_generate_the_same_text_as_one_process(
    cluster: LocalCluster, served_target: LoadedModel, codec: TextCodec
) -> None:
    """In every mode, greedy and sampled, with four requests at once, which share forwards."""
    ways = [(mode, replace(SAMPLED, temp=temp)) for temp in (0.0, 0.8) for mode in ("ar", "sd", "ssd")]
    client = cluster.client(LIMIT)
    with ThreadPoolExecutor(len(ways)) as pool:
        found = list(pool.map(lambda way: client.generate(PROMPT, way[1], mode=way[0]), ways))
    for (_, asked), result in zip(ways, found, strict=True):
        check_text(served_target, codec, asked, result)
    assert len(wait_until_ready(cluster)) == 2


def test_text_continues_after_a_rank_dies_and_no_rank_is_left(
    cluster: LocalCluster, served_target: LoadedModel, codec: TextCodec
) -> None:
    """Rank 1 is killed in the middle of a text. With OUTRIDER_RANKS=1, rank 0 is killed and rank 1 suspended, too."""
    client, tries = cluster.client(LIMIT), 20
    deaths = [(1, signal.SIGKILL, CONSTRAINED), (0, signal.SIGKILL, WITH_LOGPROBS), (1, signal.SIGSTOP, GREEDY)]
    for rank, number, sampling in deaths if LONG_FORM else deaths[:1]:
        for _ in range(tries):  # a text may be over before its rank dies
            before = wait_until_ready(cluster)
            stream = client.stream(PROMPT, sampling, mode="ssd")
            for count, _ in enumerate(stream):
                if count == 2:
                    os.kill(before[rank], number)
            check_text(served_target, codec, sampling, stream.result)
            wait_until_gone(before)
            if stream.result.timings.resumed:
                break
        assert stream.result.timings.resumed


@pytest.mark.skipif(not LONG_FORM, reason="starts two more clusters; OUTRIDER_RANKS=1 does")
def test_drafter_can_run_in_rank_0_and_an_invalid_shard_count_is_refused(
    served: Pair, served_target: LoadedModel, codec: TextCodec
) -> None:
    pair = {"model": served.target, "draft_model": served.draft}
    with LocalCluster(**pair, shards=2, colocate=True) as cluster:
        check_text(served_target, codec, SAMPLED, cluster.client(LIMIT).generate(PROMPT, SAMPLED, mode="sd"))
        left = ranks(cluster)
    wait_until_gone(left)
    with pytest.raises(WorkerError, match="this llama model can't be sharded over 3 ranks"):
        LocalCluster(model=served.target, shards=3, draft_backend="none", mode="ar")


@pytest.mark.skipif(not LONG_FORM, reason="starts one more cluster; OUTRIDER_RANKS=1 does")
@pytest.mark.parametrize(("kind", "write"), [("eagle3", write_feature_head), ("redrafter", write_recurrent_head)])
def test_head_can_run_in_rank_0_unless_it_needs_the_whole_output_layer(
    tmp_path: Path, kind: str, write: Callable[[Path, LoadedModel], Path]
) -> None:
    target = markov_llama(tmp_path / "target")
    head = write(tmp_path / "head", target)
    params = SamplingParams(max_tokens=24, temp=0.8, seed=3, ignore_eos=True)
    heads = [head, "early-exit"]
    with LocalCluster(
        model=tmp_path / "target", draft_backend="none", head=heads, shards=2, ngrams=False, memory=False
    ) as cluster:
        client = cluster.client(LIMIT)
        alone, by_head = (client.generate([40, 41, 42], params, mode=mode) for mode in ("ar", "sd"))
        left = ranks(cluster)
    assert alone.token_ids == by_head.token_ids
    assert list(by_head.timings.draft_n_accepted_by) == [kind]
    assert any("early-exit is not used" in note and "use it without shards" in note for note in by_head.notes)
    wait_until_gone(left)


@pytest.mark.skipif(not LONG_FORM, reason="starts two more clusters; OUTRIDER_RANKS=1 does")
def test_ranks_started_by_mlx_launch_join_and_rejoin(
    served: Pair, served_target: LoadedModel, codec: TextCodec
) -> None:
    """As a user does it: the server waits, mlx.launch starts both ranks, and starts them again after they have died."""
    progress, endpoints, launched = queue.Queue[str](), queue.Queue[str](), list[subprocess.Popen[bytes]]()

    def launch(endpoint: str) -> None:
        ring = ["-n", "2", "--backend", "ring", "--starting-port", str(free_ports(1)[0])]
        command = [str(Path(sys.executable).with_name("mlx.launch")), *ring, "--", *python("-m", "outrider")]
        command += ["worker", "target", "--shard", "--connect", endpoint, "--model", str(served.target)]
        environment = system.blas_environment(child_environment(), 1)
        launched.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True))

    def launch_when_ready() -> None:
        while " --connect " not in (stage := progress.get(timeout=LIMIT)):
            pass
        endpoints.put(stage.partition(" --connect ")[2])
        launch(endpoints.queue[0])

    threading.Thread(target=launch_when_ready).start()
    try:
        pair = {"model": served.target, "draft_model": served.draft}
        with LocalCluster(**pair, await_target=True, worker_timeout=4, progress=progress.put) as cluster:
            stream = cluster.client(LIMIT).stream(PROMPT, WITH_LOGPROBS, mode="ssd")
            for count, _ in enumerate(stream):
                if count == 2:
                    os.killpg(launched[0].pid, signal.SIGKILL)
                    launched[0].wait()
                    time.sleep(6)  # until the server has noticed the loss; it refuses a target that comes earlier
                    launch(endpoints.get())
            assert stream.result.timings.resumed == 1
            check_text(served_target, codec, WITH_LOGPROBS, stream.result)
    finally:
        for one in launched:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
