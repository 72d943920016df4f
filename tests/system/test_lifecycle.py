"""Real processes start, answer requests, and leave nothing behind, however one of them ends."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import Client, LocalCluster, SamplingParams
from outrider.orchestrator.cli import main
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import EndpointError, OutriderError, WorkerError
from outrider.protocol.keys import Keyring
from outrider.protocol.socket_files import PrivateDirectory
from tests.suspend import pid_of, suspended_text, throttled
from tests.tiny import Pair

LIMIT = 200.0
PROMPT = "def fibonacci(n):"
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temp=1.0, seed=1)
ENDLESS = replace(LONG, max_tokens=3000)


def outrider(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python("-m", "outrider", *arguments),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def set_file_limit(files: tuple[int, int]) -> Callable[[], None]:
    """Returns a `preexec_fn` that sets the soft and the hard limit of open files."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files)


@contextmanager
def idle_connections(endpoint: str, count: int) -> Iterator[None]:
    """Opens so many connections that send nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(endpoint.removeprefix("ipc://"))
        yield


def run_dir(endpoint: str) -> str:
    return str(Path(endpoint.removeprefix("ipc://")).parent)


def processes_of(directory: str) -> list[str]:
    """Returns the command lines of the processes that name a run directory, which are its workers."""
    listing = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if directory in line]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} within {LIMIT} s")
        time.sleep(0.05)


def wait_until_all_is_gone(directory: str) -> None:
    wait_until(lambda: not processes_of(directory), f"processes of {directory} end")
    wait_until(lambda: not os.path.exists(directory), f"{directory} is removed")


def wait_after_kill(directory: str) -> None:
    """Waits for the end of a killed server's processes; the next server removes its directory."""
    wait_until(lambda: not processes_of(directory), f"processes of {directory} end")
    with PrivateDirectory():
        assert not os.path.exists(directory)


def wait_until_prepared_is_served(client: Client, sampling: SamplingParams) -> None:
    """Waits until a prepared branch is served; throttles the target if the drafter is too slow on a busy machine."""

    def is_served() -> bool:
        return client.generate(PROMPT, sampling, mode="ssd").timings.cache_hits > 0

    if not is_served():
        with throttled(pid_of(client, "target")):
            wait_until(is_served, "something prepared is served")


class ServeProcess:
    """A running `outrider serve` that has printed its endpoints."""

    def __init__(self, *arguments: str, files: tuple[int, int] | None = None) -> None:
        self.process = outrider("serve", "--no-http", *arguments, preexec_fn=set_file_limit(files) if files else None)
        lines = [self.process.stdout.readline() for _ in range(2)] if self.process.stdout else []
        if not lines[0].startswith("clients: "):
            pytest.fail(f"expected endpoints, got {lines} and {self.process.communicate()}")
        self.endpoint = lines[0].split()[1]
        self.workers = lines[1].split()[1]
        self.directory = run_dir(self.workers)


@pytest.fixture
def serve(served: Pair) -> Iterator[Callable[..., ServeProcess]]:
    started: list[ServeProcess] = []

    def start(*arguments: str, files: tuple[int, int] | None = None) -> ServeProcess:
        draft = () if "--draft-backend" in arguments else ("--draft-model", str(served.draft))
        started.append(ServeProcess("--model", str(served.target), *draft, *arguments, files=files))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()
        wait_after_kill(server.directory)


@pytest.fixture(scope="module")
def cluster(served: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(model=served.target, draft_model=served.draft, worker_timeout=4) as running:
        yield running


# --- requests -----------------------------------------------------------------------------------------------------


def test_three_processes_give_the_same_text_in_every_mode(cluster: LocalCluster) -> None:
    client = cluster.client()
    assert {worker.role for worker in client.stats().workers} == {"target", "draft"}
    sampling = SamplingParams(max_tokens=80, temp=0.8, top_p=0.95, seed=7, ignore_eos=True)
    results = {mode: client.generate(PROMPT, sampling, mode=mode) for mode in ("ar", "sd", "ssd")}
    assert len({result.token_ids for result in results.values()}) == 1
    assert len({result.text for result in results.values()}) == 1
    assert [results[mode].mode for mode in results] == list(results)
    assert results["ar"].timings.draft_n == 0
    assert results["ar"].timings.predicted_n == len(results["ar"].token_ids) == 80
    wait_until_prepared_is_served(client, sampling)


def test_a_stop_string_gives_the_same_tokens_in_every_mode(cluster: LocalCluster) -> None:
    client = cluster.client()
    whole = client.generate(PROMPT, SamplingParams(max_tokens=48))
    stop = whole.text[20:24]
    results = [client.generate(PROMPT, SamplingParams(max_tokens=48, stop=(stop,)), mode=m) for m in ("ar", "ssd")]
    assert {result.text for result in results} == {whole.text[: whole.text.index(stop)]}
    assert results[0].token_ids == results[1].token_ids
    assert [result.finish_reason for result in results] == ["stop", "stop"]
    assert all(result.timings.predicted_n == len(result.token_ids) for result in results)


def test_leaving_a_stream_frees_the_server_for_the_next(cluster: LocalCluster) -> None:
    client = cluster.client()
    for _ in client.stream(PROMPT, ENDLESS):
        break
    assert client.generate(PROMPT, SamplingParams(max_tokens=4)).finish_reason == "length"
    assert client.stats().active == 0


def test_second_cluster_by_tcp_gives_the_same_text_and_is_closed_by_any_thread(
    cluster: LocalCluster, served: Pair
) -> None:
    sampling = SamplingParams(max_tokens=8)
    other = LocalCluster(endpoint="tcp://127.0.0.1:0", model=served.target, draft_backend="none")
    with other:
        assert other.endpoint != cluster.endpoint and not other.endpoint.endswith(":0")
        alone = Client(other.endpoint).generate(PROMPT, sampling)
        assert alone.mode == "ar" and alone.text == cluster.client().generate(PROMPT, sampling).text
        with ThreadPoolExecutor(4) as pool:
            closings = [pool.submit(other.close) for _ in range(4)]
        assert [closing.result() for closing in closings] == [None] * 4
    assert other.wait() == 0
    wait_until_all_is_gone(run_dir(other.workers_endpoint))


# --- the command line ---------------------------------------------------------------------------------------------


def test_generate_leaves_no_processes_and_its_json_can_be_verified(
    cluster: LocalCluster, served: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("--model", str(served.target), "--draft-model", str(served.draft))
    sampling = ("--max-tokens", "24", "--temp", "0.9", "--top-p", "0.9", "--ignore-eos", "--seed", "1")
    process = outrider("generate", "--prompt", PROMPT, *models, *sampling, "--json")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0 and "Traceback" not in err, err
    same = SamplingParams(max_tokens=24, temp=0.9, top_p=0.9, ignore_eos=True, seed=1)
    assert json.loads(out)["text"] == cluster.client().generate(PROMPT, same).text
    assert not processes_of(f"--parent-fd {process.pid}")
    file = tmp_path / "output.json"
    file.write_text(out)
    assert main(["verify", str(file), "--json"]) == 0, err
    found = json.loads(capsys.readouterr().out)
    assert found["certified"] and found["positions"] == 24 == found["identical"] + len(found["ties"])
    changed = json.loads(out)
    changed["token_ids"][5] = (changed["token_ids"][5] + 1) % 256
    file.write_text(json.dumps(changed))
    assert main(["verify", str(file)]) == 1
    out = capsys.readouterr().out
    assert "NOT the target's output" in out and "MISMATCH at" in out


def test_sigterm_finishes_running_requests_refuses_new_ones_and_removes_the_socket(
    serve: Callable[..., ServeProcess], short: Path
) -> None:
    server = serve("--endpoint", f"ipc://{short}/c", "--draft-backend", "ngram", "--drain-timeout", str(int(LIMIT)))
    client, other = Client(server.endpoint), Client(server.endpoint)

    def refused() -> bool:
        """Returns whether the server is draining. Its request is invalid, so that it never waits for the target."""
        with pytest.raises(OutriderError) as error:
            other.generate(PROMPT, drafter="unheard-of")
        return isinstance(error.value, WorkerError) and "accepts no new requests" in str(error.value)

    with suspended_text(other, lambda: client.stream(PROMPT, LONG)) as (stream, chunks):
        server.process.send_signal(signal.SIGTERM)
        wait_until(refused, "new requests are refused")
    for _ in chunks:
        pass
    assert len(stream.result.token_ids) == LONG.max_tokens
    out, err = server.process.communicate(timeout=LIMIT)
    assert (server.process.returncode, out) == (0, "") and "Traceback" not in err
    assert list(short.iterdir()) == []


def test_reconnecting_client_continues_its_text_on_the_next_server(
    serve: Callable[..., ServeProcess], short: Path
) -> None:
    """The server is killed, or ends without draining, which is an error for clients that do not reconnect."""
    options = ("--endpoint", f"ipc://{short}/c", "--draft-backend", "ngram", "--drain-timeout", "0")
    sampling = replace(LONG, temp=0.8, seed=None, repetition_penalty=1.1)
    server = serve(*options)
    for number in (signal.SIGKILL, signal.SIGTERM):
        asking, other = Client(server.endpoint, reconnect=True), Client(server.endpoint)
        with (
            suspended_text(other, lambda asking=asking: asking.stream(PROMPT, sampling)) as (stream, chunks),
            ThreadPoolExecutor(1) as once,
        ):
            without = once.submit(other.generate, PROMPT, LONG) if number == signal.SIGTERM else None
            wait_until(lambda o=other, n=2 if without else 1: o.stats().active + o.stats().queued == n, "all ask")
            server.process.send_signal(number)
            server.process.wait(LIMIT)
            if without:
                with pytest.raises(WorkerError, match="stopped before"):
                    without.result(LIMIT)
        (wait_after_kill if number == signal.SIGKILL else wait_until_all_is_gone)(server.directory)
        assert "Traceback" not in server.process.communicate()[1]
        assert bool(list(short.iterdir())) == (number == signal.SIGKILL)
        server = serve(*options)
        for _ in chunks:
            pass
        result = stream.result
        whole = Client(server.endpoint).generate(PROMPT, replace(sampling, seed=result.seed))
        assert (result.token_ids, result.text, result.finish_reason) == (whole.token_ids, whole.text, "length")
        assert 0 < result.timings.predicted_n < len(result.token_ids) == LONG.max_tokens


def test_foreign_socket_at_a_killed_servers_path_is_kept(serve: Callable[..., ServeProcess], short: Path) -> None:
    server = serve("--endpoint", f"ipc://{short}/c")
    (short / "c").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{short}/c")
        server.process.kill()
        wait_after_kill(server.directory)
        assert (short / "c").is_socket()


def test_killed_parent_ends_its_cluster(served: Pair) -> None:
    code = (
        "from outrider import LocalCluster; import time\n"
        f"held = LocalCluster(model={str(served.target)!r}, draft_backend='ngram')\n"
        "print(held.endpoint, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(python("-c", code), env=child_environment(), stdout=subprocess.PIPE, text=True) as parent:
        endpoint = parent.stdout.readline().strip() if parent.stdout else ""
        alive = processes_of(run_dir(endpoint)) if endpoint else []
        parent.kill()
    assert any("target_worker" in line for line in alive), alive
    wait_until_all_is_gone(run_dir(endpoint))


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", ["directory", "endpoint", "keyed endpoint"])
def test_server_whose_sockets_were_removed_ends_with_an_error(
    serve: Callable[..., ServeProcess], short: Path, removed: str
) -> None:
    """Programs that clean the temporary folder do so. No client could connect; a supervisor restarts the server."""
    keyed = ()
    if removed == "keyed endpoint":
        Keyring(short / "keys").make()
        keyed = ("--keyed", "--keys", str(short / "keys"))
    server = serve("--draft-backend", "ngram", "--endpoint", f"ipc://{short}/c", *keyed)
    if removed == "directory":
        shutil.rmtree(server.directory)
    else:
        (short / "c").unlink()
    _, err = server.process.communicate(timeout=LIMIT)
    assert server.process.returncode == EndpointError.exit_code and "Traceback" not in err
    assert "was removed" in err and "TMPDIR" in err


def test_dropped_cluster_ends_without_close(served: Pair) -> None:
    cluster = LocalCluster(model=served.target, draft_backend="none")
    process = cluster._process
    del cluster
    assert process.wait(LIMIT) == 0


def test_forked_process_may_use_the_cluster_and_leave_its_block(cluster: LocalCluster) -> None:
    child = os.fork()
    if not child:
        try:
            with cluster:
                cluster.client().generate("x", max_tokens=2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert cluster.client().generate("x", max_tokens=2).finish_reason == "length"


def test_forked_process_may_use_a_client_that_is_in_use(cluster: LocalCluster) -> None:
    client, (read, write) = cluster.client(LIMIT), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(read, 1)
            client.generate("x", max_tokens=2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    with client.stream(PROMPT, LONG) as stream:
        reading = iter(stream)
        next(reading)
        os.write(write, b"x")
        assert os.waitpid(child, 0)[1] == 0


def test_paused_processes_continue_without_changing_the_text(cluster: LocalCluster) -> None:
    """Workers are suspended for longer than a drafter is waited for, the server for longer than the worker timeout."""
    client, sampling = cluster.client(timeout=LIMIT), replace(LONG, max_tokens=60)
    whole = client.generate(PROMPT, sampling, mode="ar").token_ids
    for role, seconds in (("target", 2), ("draft", 2), ("server", 6)):
        pid = cluster.pid if role == "server" else pid_of(client, role)
        stream = client.stream(PROMPT, sampling, mode="ssd")
        for count, _ in enumerate(stream):
            if count == 2:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
        assert stream.result.token_ids == whole
        wait_until(lambda: {worker.state for worker in client.stats().workers} == {"ready"}, "all answer again")
    wait_until_prepared_is_served(client, sampling)


@pytest.mark.parametrize(("role", "words"), [("target", "accepts no other"), ("draft", "the name target-0 is taken")])
def test_worker_with_the_targets_name_is_refused(cluster: LocalCluster, served: Pair, role: str, words: str) -> None:
    client, workers = cluster.client(), f"ipc://{run_dir(cluster.endpoint)}/workers"
    known, text = _workers(client), client.generate(PROMPT, SamplingParams(max_tokens=8)).text
    models = {"target": ("--model", str(served.target)), "draft": ("--draft-model", str(served.draft))}
    stranger = outrider("worker", role, "--connect", workers, "--name", "target-0", *models[role])
    _, err = stranger.communicate(timeout=LIMIT)
    assert stranger.returncode == WorkerError.exit_code and words in err and "Traceback" not in err
    assert _workers(client) == known
    assert client.generate(PROMPT, SamplingParams(max_tokens=8)).text == text


def _workers(client: Client) -> list[tuple[str, str, int, str]]:
    return [(worker.role, worker.name, worker.pid, worker.state) for worker in client.stats().workers]


def test_garbage_on_either_socket_does_not_disturb_a_running_request(cluster: LocalCluster) -> None:
    client = cluster.client()
    directory = run_dir(cluster.endpoint)
    stream = client.stream(PROMPT, SamplingParams(max_tokens=64))
    for count, _ in enumerate(stream):
        if count == 1:
            for name in ("clients", "workers"):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(f"{directory}/{name}")
                    raw.sendall(os.urandom(4096))
    assert stream.result.finish_reason in ("length", "eos")
    assert len(stream.result.token_ids) <= 64


def test_server_with_more_idle_connections_than_its_soft_file_limit_answers_and_a_second_signal_ends_its_drain(
    serve: Callable[..., ServeProcess],
) -> None:
    server = serve("--draft-backend", "ngram", files=(256, 4096))
    client, sampling = Client(server.endpoint, timeout=LIMIT), SamplingParams(max_tokens=16)
    stream = iter(client.stream(PROMPT, sampling))
    first = next(stream).text
    with idle_connections(server.endpoint, 1000), idle_connections(server.workers, 300):
        text = first + "".join(chunk.text for chunk in stream)
        assert client.generate(PROMPT, sampling).text == text
    assert client.generate(PROMPT, sampling).text == text
    with (
        suspended_text(client, lambda: client.stream(PROMPT, ENDLESS)) as (_, chunks),
        ThreadPoolExecutor(1) as reader,
    ):
        reading = reader.submit(list, chunks)

        def is_over() -> bool:
            server.process.send_signal(signal.SIGINT)  # repeatedly, because two at the same time count as one
            return reading.done()

        wait_until(is_over, "the drain ends")
        with pytest.raises(WorkerError, match="stopped before"):
            reading.result()
    _, err = server.process.communicate(timeout=LIMIT)
    assert server.process.returncode == 0 and "Traceback" not in err
    wait_until_all_is_gone(server.directory)


def test_too_low_hard_file_limit_is_an_endpoint_error(served: Pair) -> None:
    model = ("--model", str(served.target), "--draft-backend", "ngram")
    process = outrider("generate", "--prompt", PROMPT, *model, preexec_fn=set_file_limit((64, 64)))
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == EndpointError.exit_code and "Traceback" not in err
    assert "may open 64 files" in err and "ulimit -Hn" in err


def test_endpoint_in_use_is_refused_and_its_server_continues(cluster: LocalCluster) -> None:
    with pytest.raises(EndpointError, match="already served"):
        LocalCluster(endpoint=cluster.endpoint)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EndpointError, match="the port is in use"):
            LocalCluster(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(EndpointError, match="bytes; this system allows"):
        LocalCluster(endpoint="ipc:///tmp/" + "x" * 200)
    assert cluster.client().generate(PROMPT, SamplingParams(max_tokens=2)).token_ids


def test_unknown_model_type_is_an_error(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path("models/target") / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "vocab_size": 4096}))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(OutriderError, match="unheard-of"):
        LocalCluster(model=str(tmp_path))


def test_error_of_one_client_does_not_affect_others(cluster: LocalCluster) -> None:
    outcomes: list[str] = []

    def ask(prompt: str) -> None:
        try:
            outcomes.append(cluster.client().generate(prompt, SamplingParams(max_tokens=4)).finish_reason)
        except OutriderError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in (PROMPT, "x " * 3000, PROMPT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(outcomes) == ["PromptTooLong", "length", "length"]
