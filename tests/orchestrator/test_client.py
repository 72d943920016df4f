"""Both clients over real sockets, with a front and a scripted core: results, errors and cancellation."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import zmq

import outrider
from outrider import AsyncClient, Chunk, Client, LocalCluster, Resumed
from outrider.orchestrator.client.client import Liveness
from outrider.orchestrator.client.dialogue import CHECKS, GenerateFields, GenerationResult
from outrider.orchestrator.events import Admit, Committed, RequestBegan, Stop
from outrider.protocol.errors import EndpointError, InvalidRequest, ServerBusy, ServerStopped, WorkerError
from outrider.protocol.messages import StatsQuery, Timings
from outrider.protocol.sampling import SamplingFields, SamplingParams
from outrider.protocol.socket_files import PrivateDirectory
from tests.orchestrator.scripted_server import generates

SILENCE = 0.3


def test_generate_options_match_request_fields_and_are_documented():
    """`rounds` is not among them, because it is a separate argument."""
    sampling = get_type_hints(SamplingFields)
    options = [name for name in get_type_hints(GenerateFields) if name not in sampling]
    documentation = Client.generate.__doc__ or ""
    assert sorted([*options, "rounds"]) == sorted(CHECKS)
    assert not [name for name in options if name not in documentation]


def generates_without_end(codec):
    """Returns an `on_admit` that commits some text and does not end the request."""
    return lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Committed(admit.request, codec.encode("a b", special=False)),
    ]


def test_client_can_be_sent_to_another_process(server, codec):
    """macOS, and Python from 3.14 on, start the processes of a pool without `fork`, so their arguments are pickled."""
    server.core.on_admit = generates(codec, "x = 1")
    clients = [Client(server.endpoint, alive=threading.Lock().locked), Resumed([Client(server.endpoint)])]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for client in clients:
            assert pool.submit(client.generate, "x").result().text == "x = 1"
    copy = pickle.loads(pickle.dumps(AsyncClient(server.endpoint, reconnect=True, timeout=3.0)))
    assert (copy.endpoint, copy.sources, copy.timeout) == (server.endpoint, 1, 3.0)
    assert asyncio.run(copy.generate("x")).text == "x = 1"


def test_outrider_exports_the_orchestrators_names():
    for name in outrider.__all__:
        assert getattr(outrider, name) is getattr(__import__("orchestrator"), name)
    assert isinstance(outrider.__version__, str)
    with pytest.raises(AttributeError):
        outrider.nothing  # noqa: B018


def test_types_of_returned_values_are_exported():
    methods = Client.stats, Client.generate, Client._create_stream, AsyncClient._create_stream
    returned = {get_type_hints(method)["return"] for method in methods} | {get_type_hints(GenerationResult)["timings"]}
    assert returned <= {getattr(outrider, name) for name in outrider.__all__}


@pytest.mark.parametrize(("name", "expected"), [("server_key", "text"), ("keys", "a path")])
def test_key_of_a_wrong_type_is_refused(name, expected):
    with pytest.raises(InvalidRequest, match=f"{name} is 5; expected {expected}"):
        Client("ipc:///tmp/x", **{name: 5})


@pytest.mark.parametrize(
    "prompt", [(5, 6), [5, 6], range(5, 7), [np.int64(5), 6], np.array([5, 6]), np.array([5, 6], np.uint64)]
)
def test_prompt_may_be_token_ids(server, codec, prompt):
    server.core.on_admit = generates(codec, "x")
    assert server.client().generate(prompt).prompt_tokens == 2
    assert server.core.wait_for(Admit)[0].tokens == (5, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1.5]}, "neither text nor token ids"),
        ({"prompt": [-1]}, "out of range"),
        ({"prompt": [2**40]}, "out of range"),
        ({"prompt": "\ud800"}, "; expected Unicode text"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "expected a str or ints; HTTP takes messages"),
        ({"prompt": None}, "neither text nor token ids"),
        ({"prompt": 5}, "neither text nor token ids"),
        ({"prompt": b"x"}, "neither text nor token ids"),
        ({"prompt": [[1], [2, 3]]}, "neither text nor token ids"),
        ({"prompt": np.zeros((0,))}, "prompt is empty"),
        (
            {"prompt": np.zeros(2**24 + 1, int)},
            "too long: 16777217 tokens > 16777216 maximum; .*maximum context length is",
        ),
        ({"sampling": {"temp": 1}}, "sampling is .*expected SamplingParams"),
        ({"chat_template": "no"}, "chat_template is 'no'"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"branches": 1000}, "branches is 1000"),
        ({"client": "\ud800"}, "client is .*; expected Unicode text"),
        ({"drafter": "\ud800"}, "drafter is .*; expected Unicode text"),
        ({"drafter": "x" * 65}, "drafter has 65 characters; expected at most 64"),
    ],
)
def test_bad_input_is_refused_before_it_is_sent(changes, words):
    client = Client("ipc:///tmp/outrider-nobody")
    with pytest.raises(InvalidRequest, match=words):
        client.generate(**{"prompt": "x", **changes})


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "ipc://" + "x" * 200, "tcp://*:5"])
def test_invalid_endpoint_raises_endpoint_error(make, endpoint):
    with pytest.raises(EndpointError):
        result = make(endpoint).stats()
        if asyncio.iscoroutine(result):
            asyncio.run(result)


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_missing_server_socket_fails_without_waiting(make, short, monkeypatch):
    monkeypatch.setattr(Liveness, "on_silence", lambda self: pytest.fail("it waited"))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(short / "dead"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    for endpoint in (f"ipc://{short}/none", f"ipc://{short}/dead", f"tcp://127.0.0.1:{port}"):
        with pytest.raises(EndpointError, match=r"no server at .*expected an endpoint that `outrider serve` prints"):
            result = make(endpoint).generate("x")
            asyncio.run(result)


def test_too_many_open_files_raise_server_busy(server, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    client = server.client()
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ServerBusy, match="too many requests in flight"):
        client.generate("x")


@pytest.fixture
def silent_endpoint():
    """The endpoint of a socket that accepts messages and never answers."""
    with PrivateDirectory() as directory, zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.linger = 0
        silent.bind(directory.endpoint("mute"))
        yield directory.endpoint("mute")


def test_silent_server_raises_after_the_timeout(silent_endpoint):
    with pytest.raises(EndpointError, match=r"no answer from .*expected a running `outrider serve`"):
        Client(silent_endpoint, timeout=SILENCE).generate("x")


def test_client_gives_up_after_too_many_unanswered_queries(silent_endpoint):
    """Queries are counted instead of time, because a suspended client sends none."""
    liveness = Liveness(silent_endpoint, 10.0)
    for _ in range(3):
        for _ in range(11):
            assert isinstance(liveness.on_silence(), StatsQuery)
        liveness.on_message()
    for _ in range(11):
        liveness.on_silence()
    with pytest.raises(EndpointError, match="within 10 s"):
        liveness.on_silence()


@pytest.mark.parametrize("make", [LocalCluster.client, LocalCluster.async_client])
def test_client_waits_for_a_local_cluster_while_its_process_runs(silent_endpoint, make):
    """The server is silent for an hour, as on an overloaded machine, and then dies."""
    cluster = object.__new__(LocalCluster)
    cluster.own_endpoint, ended = silent_endpoint, [None]
    cluster._process, cluster._owner = SimpleNamespace(poll=lambda: ended[0]), os.getpid()
    liveness = make(cluster).liveness()
    for _ in range(3600):
        assert isinstance(liveness.on_silence(), StatsQuery)
    ended[0] = -9
    with pytest.raises(ServerStopped, match=r"died \(signal 9\)"):
        liveness.on_silence()
    with pytest.raises(EndpointError, match="within 2 s"):
        impatient = Client(silent_endpoint, 2.0).liveness()
        for _ in range(4):
            impatient.on_silence()


def test_remote_server_without_handshake_gets_the_full_timeout(monkeypatch):
    """The server may be suspended. Only a refused key is an error at once."""
    monkeypatch.setattr("outrider.protocol.endpoints.PROBE_TIMEOUT_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        liveness = Liveness(f"tcp://127.0.0.1:{stopped.getsockname()[1]}", 10.0)
        for _ in range(11):
            assert isinstance(liveness.on_silence(), StatsQuery)
        with pytest.raises(EndpointError, match="within 10 s"):
            liveness.on_silence()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "long", None])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_invalid_timeout_is_refused(make, timeout):
    with pytest.raises(InvalidRequest, match="timeout is"):
        make("ipc:///tmp/x", timeout)


def test_busy_server_does_not_time_out(server, codec, monkeypatch):
    """The core is silent, but the front's answers to the client's queries show that the server is running."""
    answers = threading.Semaphore(0)
    monkeypatch.setattr("outrider.orchestrator.client.client.ASK_AFTER_SECONDS", 0.02)
    monkeypatch.setattr(Liveness, "on_message", lambda self: answers.release() or setattr(self, "_asked", 0))
    results: list[GenerationResult] = []
    client = server.client(np.float32(100))
    thread = threading.Thread(target=lambda: results.append(client.generate("x")))
    thread.start()
    admit = server.core.wait_for(Admit)[0]
    for _ in range(5):
        assert answers.acquire(timeout=200)
    for event in generates(codec, "late")(admit):
        server.core.outbox.put(event)
    thread.join(200)
    assert results[0].text == "late"


def test_server_known_to_be_gone_fails_at_once(server):
    def gone():
        raise WorkerError("it ended")

    with pytest.raises(WorkerError, match="it ended"):
        Client(server.endpoint, alive=gone).generate("x")


def test_result_of_an_unfinished_stream_raises(server, codec):
    server.core.on_admit = generates_without_end(codec)
    stream = server.client().stream("x")
    for _ in stream:
        break
    with pytest.raises(InvalidRequest, match="not finished"):
        _ = stream.result


@pytest.mark.parametrize("leave", [True, False])
def test_stream_can_be_read_only_once(server, codec, leave):
    server.core.on_admit = generates(codec, "a b c")
    stream = server.client().stream("x")
    for _ in stream:
        if leave:
            break
    with pytest.raises(InvalidRequest, match="this stream has been read already"):
        list(stream)
    assert len(server.core.wait_for(Admit)) == 1
    if not leave:
        assert stream.result.text == "a b c"


def test_async_stream_can_be_read_only_once(server, codec):
    server.core.on_admit = generates(codec, "a b c")

    async def ask():
        stream = AsyncClient(server.endpoint).stream("x")
        assert [chunk async for chunk in stream]
        with pytest.raises(InvalidRequest, match="this stream has been read already"):
            async for _ in stream:
                pass
        return stream.result

    assert asyncio.run(ask()).text == "a b c"


def test_numpy_scalars_are_accepted(server, codec):
    server.core.on_admit = generates(codec, "x")
    sampling = SamplingParams(max_tokens=np.int64(9), temp=np.float32(0.5), stop=["zz"], logit_bias={np.int32(11): -5})
    server.client().generate(
        np.str_("x"), sampling, mode=np.str_("sd"), num_draft_tokens=np.int64(2), branches=np.uint8(6),
        chat_template=np.bool_(False),
    )  # fmt: skip
    admit = server.core.wait_for(Admit)[0]
    assert (admit.mode, admit.num_draft_tokens, admit.branches) == ("sd", 2, 6)
    assert (admit.sampling.max_tokens, admit.sampling.temp) == (9, 0.5)
    assert (admit.sampling.stop, admit.sampling.logit_bias) == (("zz",), ((11, -5.0),))


def test_one_client_serves_several_threads(make_server, codec):
    server = make_server(max_active=4).start()
    server.core.on_admit = lambda admit: generates(codec, f"<{len(admit.tokens)}>")(admit)
    client, texts = server.client(), {}
    threads = [
        threading.Thread(target=lambda n=n: texts.update({n: client.generate([5] * n).text})) for n in range(1, 7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert texts == {n: f"<{n}>" for n in range(1, 7)}


# --- asyncio ------------------------------------------------------------------------------------------------------


def test_async_client_streams_and_generates_the_same_text(server, codec):
    server.core.on_admit = generates(codec, "a b c")

    async def ask():
        client = AsyncClient(server.endpoint)
        stream = client.stream("def f(", SamplingParams(seed=3))
        chunks = [chunk async for chunk in stream]
        return chunks, stream.result, await client.generate("def f(", SamplingParams(seed=3)), await client.stats()

    chunks, streamed, generated, stats = asyncio.run(ask())
    assert "".join(chunk.text for chunk in chunks) == streamed.text == generated.text == "a b c"
    assert streamed.token_ids == generated.token_ids and streamed.seed == 3
    assert stats.finished == 2


def test_many_async_requests_run_at_once(make_server, codec):
    server = make_server(max_active=3).start()
    server.core.on_admit = lambda admit: generates(codec, str(len(admit.tokens)))(admit)

    async def ask():
        client = AsyncClient(server.endpoint)
        return await asyncio.gather(*(client.generate([5] * n) for n in range(1, 10)))

    assert [result.text for result in asyncio.run(ask())] == [str(n) for n in range(1, 10)]


@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_leaving_an_async_stream_cancels_the_request(server, codec, leave):
    server.core.on_admit = generates_without_end(codec)

    async def ask():
        got = asyncio.Event()

        async def read():
            async for _ in AsyncClient(server.endpoint).stream("x"):
                got.set()
                if leave == "break":
                    break

        task = asyncio.create_task(read())
        await got.wait()
        if leave == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    assert server.core.wait_for(Stop)[0].reason == "cancelled"


# --- results ------------------------------------------------------------------------------------------------------


def test_follow_passes_all_chunks_to_the_listener(server, codec):
    server.core.on_admit = generates(codec, "a b c")

    async def ask():
        received, stream = [], AsyncClient(server.endpoint).stream("x")
        result = await stream.follow(received.append)
        assert result == stream.result and [token for chunk in received for token in chunk.token_ids] == [
            *result.token_ids
        ]
        with pytest.raises(InvalidRequest, match="read already"):
            await stream.follow(received.append)
        return "".join(chunk.text for chunk in received)

    assert asyncio.run(ask()) == "a b c"


def test_listener_error_is_raised_and_cancels_the_request(server, codec):
    server.core.on_admit = generates_without_end(codec)

    def listener(chunk):
        raise InvalidRequest("not this")

    with pytest.raises(InvalidRequest, match="not this"):
        asyncio.run(AsyncClient(server.endpoint).stream("x").follow(listener))
    server.core.wait_for(Stop)


def test_summary_has_mlx_lm_lines_and_a_speculation_line():
    timings = Timings(
        prompt_n=10, prompt_ms=20.0, predicted_n=60, predicted_per_second=123.456, rounds=20, draft_n=80,
        draft_n_accepted=40, draft_rounds=20, cache_hits=15, cache_misses=5,
    )  # fmt: skip
    result = GenerationResult("", (), "eos", timings, 0, "ssd", 10, "m", "d")
    assert result.summary().splitlines() == [
        "Prompt: 10 tokens, 500.000 tokens-per-sec",
        "Generation: 60 tokens, 123.456 tokens-per-sec",
        "Speculation: 19 rounds, 80 drafted, 40 accepted (50.0%), 3.11 tokens per round, 15 hits (75.0%)",
    ]


def test_summary_without_speculation_says_off():
    result = GenerationResult("", (), "eos", Timings(rounds=9), 0, "ar", 1, "m", "d", ("mode ar was asked for",))
    assert result.summary().splitlines()[-2:] == ["Speculation: off", "Note: mode ar was asked for"]


def test_summary_of_a_drafting_mode_without_drafts_does_not_say_off():
    result = GenerationResult("", (), "eos", Timings(rounds=4), 0, "auto", 1, "m", "d", ("auto: ssd",))
    assert "Speculation: nothing was drafted in 3 rounds" in result.summary()


@pytest.mark.parametrize(
    ("cached", "read", "words"),
    [(0, 1, "Prompt: 1 token, "), (0, 2000, "Prompt: 2,000 tokens, "), (9, 1, "Prompt: 10 tokens (9 cached, 1 read)")],
)
def test_summary_uses_correct_plurals_and_shows_cached_prompt_tokens(cached, read, words):
    timings = Timings(prompt_n=read, cache_n=cached, prompt_ms=2.0, predicted_n=1, rounds=2, draft_n=1, cache_hits=1)
    lines = GenerationResult("", (), "eos", timings, 0, "ssd", 10, "m", "d").summary().splitlines()
    assert lines[0].startswith(words) and lines[1].startswith("Generation: 1 token, ")
    assert lines[2].startswith("Speculation: 1 round, 1 drafted, ") and " 1 hit (" in lines[2]


# --- conventions of Python ------------------------------------------------------------------------------------------


def test_dir_of_outrider_lists_only_its_api():
    assert dir(outrider) == sorted([*outrider.__all__, "__version__"])
    assert issubclass(outrider.ServerStopped, outrider.WorkerError) and issubclass(outrider.KeyFault, Exception)


def test_sampling_keywords_are_accepted_by_generate(server, codec):
    server.core.on_admit = generates(codec, "x")
    server.client().generate("x", max_tokens=10, temperature=0.5, stop="zz")
    server.client().generate("x", SamplingParams(temp=0.25, top_p=0.5), max_tokens=11)

    async def ask():
        await AsyncClient(server.endpoint).generate("x", max_tokens=12, seed=4)

    asyncio.run(ask())
    asked = [admit.sampling for admit in server.core.wait_for(Admit, 3)]
    assert [one.max_tokens for one in asked] == [10, 11, 12]
    assert [one.temp for one in asked] == [0.5, 0.25, 0.0]
    assert (asked[0].stop, asked[1].top_p, asked[2].seed) == (("zz",), 0.5, 4)


def test_sampling_keywords_match_sampling_params_fields():
    names = {field.name for field in fields(SamplingParams)} | {"temperature"}
    assert set(get_type_hints(SamplingFields)) == names


def _misspelled_calls():
    client, aclient = Client("ipc:///tmp/outrider-nobody"), AsyncClient("ipc:///tmp/outrider-nobody")
    yield lambda: client.generate("x", max_token=3), "Client.generate", "max_tokens"
    yield lambda: client.stream("x", progres=print), "Client.stream", None
    yield lambda: asyncio.run(aclient.generate("x", sead=3)), "AsyncClient.generate", "seed"
    yield lambda: Resumed([client]).generate("x", brunches=3), "Resumed.generate", "branches"
    yield lambda: SamplingParams(temprature=1), "SamplingParams", "temperature"
    yield lambda: SamplingParams().changed(top_q=1), "SamplingParams", "top_p"
    yield lambda: Client("ipc:///tmp/x", timout=3), "Client", "timeout"
    yield lambda: AsyncClient("ipc:///tmp/x", timout=3), "AsyncClient", "timeout"
    yield lambda: LocalCluster(modell="x"), "LocalCluster", "model"


@pytest.mark.parametrize("call, function, meant", list(_misspelled_calls()))
def test_unknown_keyword_error_names_the_called_function(call, function, meant):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(f"{function}() got an unexpected keyword argument")
    assert meant is None or str(raised.value).endswith(f"did you mean {meant!r}?")


def test_closing_a_stream_cancels_the_request(server, codec):
    server.core.on_admit = generates_without_end(codec)
    stream = server.client().stream("x")
    reading = iter(stream)
    next(reading)
    stream.close()
    stream.close()
    assert server.core.wait_for(Stop)[0].reason == "cancelled"
    assert list(reading) == []
    with pytest.raises(InvalidRequest, match="closed before"):
        _ = stream.result
    with pytest.raises(InvalidRequest, match="this stream is closed"):
        list(stream)


@pytest.mark.parametrize("brings", ["chunks", "nothing"])
def test_stream_read_by_another_thread_can_be_closed(server, codec, monkeypatch, brings):
    monkeypatch.setattr("outrider.orchestrator.client.client.ASK_AFTER_SECONDS", 0.02)
    server.core.on_admit = (
        generates_without_end(codec) if brings == "chunks" else lambda admit: [RequestBegan(admit.request, "ssd")]
    )
    stream, left = server.client().stream("x"), threading.Event()
    thread = threading.Thread(target=lambda: list(stream) == [] or left.set())
    thread.start()
    server.core.wait_for(Admit)
    stream.close()
    thread.join(200)
    assert not thread.is_alive() and server.core.wait_for(Stop)


def test_exiting_during_a_stream_cancels_the_request_quietly(server, codec):
    server.core.on_admit = generates_without_end(codec)
    program = (
        f"import outrider; reading = iter(outrider.Client({server.endpoint!r}).stream('x')); next(reading)\n"
        "keep = [reading]; keep.append(keep)"  # a cycle that is collected only when the interpreter exits
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert server.core.wait_for(Stop)


def test_leaving_a_client_context_closes_its_streams(server, codec):
    server.core.on_admit = generates_without_end(codec)
    with server.client() as client:
        reading = iter(client.stream("x"))
        stream = client.stream("y")
        next(reading)
        with client.stream("z"):
            pass
    assert "outrider" not in repr(client) or server.endpoint in repr(client)
    with pytest.raises(InvalidRequest, match="this Client is closed"):
        client.generate("x")
    with pytest.raises(InvalidRequest, match="this stream is closed"):
        list(stream)
    del reading
    server.core.wait_for(Stop)


@pytest.mark.parametrize("by", ["stream", "client", "task"])
def test_async_stream_can_be_closed(server, codec, by):
    server.core.on_admit = generates_without_end(codec)

    async def ask():
        async with AsyncClient(server.endpoint) as client:
            stream = client.stream("x")
            reading = aiter(stream)
            await anext(reading)
            if by == "stream":
                await stream.close()
                await stream.close()
            elif by == "task":

                async def rest():
                    return [chunk async for chunk in reading]

                waiting = asyncio.create_task(rest())
                await asyncio.sleep(0)
                await stream.close()
                await waiting
        with pytest.raises(InvalidRequest, match="this AsyncClient is closed"):
            client.stream("x")
        with pytest.raises(InvalidRequest, match="closed before"):
            _ = stream.result

    asyncio.run(ask())
    assert server.core.wait_for(Stop)[0].reason == "cancelled"


def test_async_stream_of_a_silent_server_can_be_closed(silent_endpoint):
    async def ask():
        stream = AsyncClient(silent_endpoint, 1e9).stream("x")
        reading = asyncio.create_task(anext(aiter(stream), None))
        await asyncio.sleep(0.01)
        await stream.close()
        return await asyncio.wait_for(reading, 100)

    assert asyncio.run(ask()) is None


def test_closing_an_async_client_fails_its_calls(server, codec):
    server.core.on_admit = generates_without_end(codec)

    async def ask():
        async with AsyncClient(server.endpoint) as client:
            calling = asyncio.create_task(client.generate("x"))
            await asyncio.to_thread(server.core.wait_for, Admit)
        with pytest.raises(InvalidRequest, match="closed before"):
            await calling

    asyncio.run(ask())


def test_reprs_are_informative(server, codec):
    server.core.on_admit = generates(codec, "a b")
    result = server.client().generate("x", seed=3)
    assert repr(result).startswith("GenerationResult(text='a b', finish_reason='eos', seed=3, ")
    assert "timings" not in repr(result) and "token_ids" not in repr(result)
    assert repr(SamplingParams(temperature=0.5)) == "SamplingParams(temp=0.5)"
    assert repr(Chunk("a", (5,))) == "Chunk(text='a', token_ids=(5,))"
    client = Client("ipc:///tmp/x")
    assert repr(client) == "Client('ipc:///tmp/x')" and repr(Resumed([client])) == f"Resumed([{client!r}])"
