"""What a client receives from the front, and what the front requests of a scripted core."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import zmq
from msgspec import msgpack

from outrider.orchestrator.auth import CurveAuth, new_client_id
from outrider.orchestrator.client.dialogue import TokenLogprob
from outrider.orchestrator.events import (
    Admit,
    Committed,
    Failure,
    RequestBegan,
    RequestEnded,
    ServerReady,
    Stage,
    Stop,
    WorkersChanged,
)
from outrider.orchestrator.front.loop import queue_path
from outrider.orchestrator.sockets import ClientSocket, Rate
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.codec import decode, encode
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import InvalidRequest, ModelError, OutriderError, ServerBusy, WorkerError, make_error
from outrider.protocol.keys import CLIENT, AllowedKey, ClientKeys, Keyring, make_pair
from outrider.protocol.messages import (
    Cancel,
    Done,
    DraftWork,
    Failed,
    Generate,
    Hello,
    Progress,
    RoundRecord,
    Span,
    Started,
    Stats,
    StatsQuery,
    TextChunk,
    Timings,
)
from outrider.protocol.sampling import Grammar, SamplingParams
from outrider.protocol.schema import IMPOSSIBLE_LOGPROB, Logprobs, Origin
from outrider.protocol.stats import Durations
from tests.orchestrator.scripted_server import generates, worker_stats

WAIT_MS = 200_000


class RawClient:
    """A client that sends single messages, including ones that Client never sends."""

    def __init__(self, endpoint, routing_id=None):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if routing_id is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self.socket.connect(endpoint)

    def send(self, message):
        self.socket.send_multipart(encode(message))

    def receive(self):
        assert self.socket.poll(WAIT_MS), "nothing came"
        return decode(self.socket.recv_multipart())

    def receive_until(self, kind):
        received = [self.receive()]
        while not isinstance(received[-1], kind):
            received.append(self.receive())
        return received

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.socket.close()


def ask(request="q", prompt="def f(", **changes):
    return Generate(request, prompt, None, changes.pop("sampling", SamplingParams()), **changes)


def test_text_tokens_and_settings_reach_the_client(server, codec):
    server.core.on_admit = generates(codec, "return 'héllo 你好'\n")
    result = server.client().generate("def f(", SamplingParams(seed=7), mode="ssd")
    assert result.text == "return 'héllo 你好'\n"
    assert result.token_ids == (*codec.encode("return 'héllo 你好'\n", special=False), 0)
    assert (result.finish_reason, result.seed, result.mode) == ("eos", 7, "ssd")
    assert result.prompt_tokens == len(codec.encode("def f("))
    assert result.model == "tiny" and result.draft_model.endswith("models/draft")
    assert result.timings.predicted_n == len(result.token_ids)


def test_core_receives_tokens_seed_and_end_tokens(server, codec):
    server.core.on_admit = generates(codec, "x")
    server.client().generate("def f(", SamplingParams(temp=0.5), mode="sd", num_draft_tokens=3, branches=7)
    admit = server.core.wait_for(Admit)[0]
    assert admit.tokens == codec.encode("def f(") and admit.eos == frozenset({0})
    assert admit.sampling.seed is not None and admit.sampling.temp == 0.5
    assert (admit.mode, admit.num_draft_tokens, admit.branches) == ("sd", 3, 7)


def test_ignore_eos_admits_without_end_tokens(server, codec):
    server.core.on_admit = generates(codec, "x", "length")
    server.client().generate("def f(", SamplingParams(ignore_eos=True))
    assert server.core.wait_for(Admit)[0].eos == frozenset()


def test_seeds_differ_when_none_is_given(server, codec):
    server.core.on_admit = generates(codec, "x")
    assert len({server.client().generate("a").seed for _ in range(4)}) == 4


def test_a_stop_string_ends_the_text_before_it_and_stops_the_core(server, codec):
    text = "abc def ghi"
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"), Committed(admit.request, codec.encode(text, special=False))
    ]  # fmt: skip
    result = server.client().generate("x", SamplingParams(stop=("c d",)))
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert server.core.wait_for(Stop)[0].reason == "stop"
    kept = codec.encode(text, special=False)[: len(result.token_ids)]
    assert result.token_ids == kept and "c d" in codec.decode(kept) and "c d" not in codec.decode(kept[:-1])
    assert result.timings.predicted_n == len(kept), "tokens past the stop string count"


def test_partial_stop_string_at_the_end_is_kept(server, codec):
    server.core.on_admit = generates(codec, "abc", "length")
    assert server.client().generate("x", SamplingParams(stop=("c d",))).text == "abc"


def test_logprobs_match_the_kept_tokens(server, codec):
    tokens = codec.encode("abc def ghi", special=False)
    ids = np.array([[token, 7, token] for token in tokens], np.int32)
    values = np.array([[-float(i), IMPOSSIBLE_LOGPROB, -0.5] for i in range(len(tokens))], np.float32)
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Committed(admit.request, tokens[:2], Logprobs(ids, values).part(0, 2)),
        Committed(admit.request, tokens[2:], Logprobs(ids, values).part(2, len(tokens))),
    ]
    stream = server.client().stream("x", SamplingParams(stop=("c d",), logprobs=2))
    chunks = list(stream)
    kept = stream.result.token_ids
    assert len(kept) < len(tokens) and [len(c.logprobs) for c in chunks] == [len(c.token_ids) for c in chunks]
    expected = tuple(TokenLogprob(token, -float(i), ((token, -0.5),)) for i, token in enumerate(kept))
    assert stream.result.logprobs == expected == sum((c.logprobs for c in chunks), ())
    server.core.on_admit = generates(codec, "x")
    assert server.client().generate("x").logprobs is None


def test_origins_match_the_kept_tokens(server, codec):
    tokens = codec.encode("abc def ghi", special=False)
    origins = tuple(Origin(i % len(Origin)) for i in range(len(tokens)))
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Committed(admit.request, tokens[:2], origins=origins[:2] if admit.origins else None),
        Committed(admit.request, tokens[2:], origins=origins[2:] if admit.origins else None),
    ]
    stream = server.client().stream("x", SamplingParams(stop=("c d",)), origins=True)
    chunks = list(stream)
    kept = stream.result.token_ids
    assert len(kept) < len(tokens) and stream.result.origins == origins[: len(kept)]
    assert sum((chunk.origins for chunk in chunks), ()) == origins[: len(kept)]
    assert server.client().generate("x", SamplingParams(stop=("c d",))).origins is None


def test_round_records_come_with_their_tokens_if_requested(server, codec):
    work = [(DraftWork("draft-0", n, 1, 3, Span(n, n)),) for n in range(2)]
    rounds = [RoundRecord(n, "hit", "prepared", 2, 1, 2, Span(n, n + 1), None, work[n]) for n in range(2)]
    tokens = codec.encode("abc", special=False)
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        *(Committed(admit.request, tokens, rounds=(r,) if admit.rounds else None) for r in rounds),
        RequestEnded(admit.request, "length", Timings()),
    ]
    chunks = list(server.client().stream("x", rounds=True))
    assert [record for chunk in chunks for record in chunk.rounds or ()] == rounds
    assert all(chunk.rounds is None for chunk in server.client().stream("x"))


def test_grammar_is_refused_without_an_end_token(server):
    server.admission._codec = replace(server.codec, eos=frozenset())
    with pytest.raises(InvalidRequest, match="has no end token"):
        server.client().generate("x", SamplingParams(grammar=Grammar.json_object()))


def test_prompt_progress_is_reported(server, codec):
    reported = []
    server.core.on_admit = lambda admit: [Progress(admit.request, 5, 9), *generates(codec, "x")(admit)]
    for _ in server.client().stream("def f(", progress=lambda done, total: reported.append((done, total))):
        pass
    assert reported == [(5, 9)]


def test_notes_from_start_and_end_are_both_reported(server):
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ar", ("no drafter",)),
        RequestEnded(admit.request, "length", Timings(), ("too late",)),
    ]
    result = server.client().generate("x")
    assert result.notes == ("no drafter", "too late")
    assert "Note: no drafter\nNote: too late" in result.summary()


def test_failed_request_raises_the_named_error(server):
    server.core.on_admit = lambda admit: [Failed(admit.request, "WorkerError", "the target died")]
    with pytest.raises(WorkerError, match="the target died"):
        server.client().generate("x")


def test_leaving_the_stream_loop_cancels_the_request(server, codec):
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Committed(admit.request, codec.encode("a b c")),
    ]
    for _ in server.client().stream("x"):
        break
    stop = server.core.wait_for(Stop)[0]
    assert stop == Stop(server.core.wait_for(Admit)[0].request, "cancelled")


def test_request_of_a_disconnected_client_is_cancelled(server):
    with RawClient(server.endpoint) as client:
        client.send(ask())
        admit = server.core.wait_for(Admit)[0]
        server.core.outbox.put(RequestBegan(admit.request, "ssd"))
        client.receive_until(Started)
    while not any(isinstance(event, Stop) for event in server.core.received):
        server.core.outbox.put(Committed(admit.request, (5,)))
        with server.core.condition:
            server.core.condition.wait(0.01)
    assert server.core.wait_for(Stop)[0].reason == "cancelled"


def test_a_waiting_request_can_be_cancelled_and_never_runs(server):
    with RawClient(server.endpoint) as client:
        times = [clock.now()]
        client.send(ask("first"))
        client.send(ask("second"))
        server.core.wait_for(Admit)
        for _ in range(2):  # after the first answer, both requests have arrived
            times.append(clock.now())
            client.send(StatsQuery("s"))
            client.receive_until(Stats)
        times.append(clock.now())
        client.send(Cancel("second"))
        done = client.receive_until(Done)[-1]
        assert (done.request, done.reason) == ("second", "cancelled")
        client.send(Cancel("first"))
        first = client.receive_until(Done)[-1]
        assert 0 < first.timings.queue_ms <= (times[1] - times[0]) / MILLISECOND_NS, "one waited a moment"
        assert done.timings.queue_ms >= (times[3] - times[2]) / MILLISECOND_NS, "the other all the time"
        assert len([event for event in server.core.received if isinstance(event, Admit)]) == 1


def test_clients_take_turns(server):
    many, one = new_client_id(), new_client_id()
    with RawClient(server.endpoint, many + b"1") as greedy, RawClient(server.endpoint, one + b"1") as modest:
        for serial in range(3):
            greedy.send(ask(f"g{serial}", prompt="def g("))
        server.core.wait_for(Admit)
        greedy.send(StatsQuery("s"))
        greedy.receive_until(Stats)
        modest.send(ask("m0", prompt="def m("))
        modest.send(StatsQuery("s"))
        modest.receive_until(Stats)
        for count in range(1, 5):
            admits = server.core.wait_for(Admit, count)
            server.core.outbox.put(RequestEnded(admits[-1].request, "length", Timings()))
        order = [server.codec.decode(admit.tokens[1:]) for admit in server.core.wait_for(Admit, 4)]
    assert order == ["def g(", "def g(", "def m(", "def g("] or order == ["def g(", "def m(", "def g(", "def g("]


def test_users_of_a_local_gateway_take_turns_like_clients(server):
    with RawClient(server.endpoint, new_client_id() + b"1") as gateway:
        for serial, user in enumerate(("greedy", "greedy", "greedy", "modest")):
            gateway.send(ask(f"q{serial}", prompt=f"def {user[0]}(", client=user))
        gateway.send(StatsQuery("s"))
        gateway.receive_until(Stats)
        for count in range(1, 5):
            admits = server.core.wait_for(Admit, count)
            server.core.outbox.put(RequestEnded(admits[-1].request, "length", Timings()))
        order = [server.codec.decode(admit.tokens[1:]) for admit in server.core.wait_for(Admit, 4)]
    assert "def m(" in order[:3]


def test_queue_path_depends_on_key_and_user():
    """With a key, the key identifies the client. Without a key, the user that a client names is believed."""
    one, other = new_client_id() + b"1", new_client_id() + b"2"
    assert queue_path(one, "", "") == (one[:9],) and queue_path(one, "ann", "") == queue_path(other, "ann", "") == (
        b"for ann",
    )
    assert queue_path(one, "ann", "key") == (b"key", b"for ann") and queue_path(other, "", "key") == (b"key", other[:9])


def test_client_key_is_attached_to_each_message(tmp_path, short):
    ring, friend = Keyring(tmp_path / "keys"), make_pair()
    ring.make()
    ring.allow(AllowedKey(CLIENT, friend.public, "friend"))
    context = zmq.Context()
    auth = CurveAuth(context, ring)
    clients = ClientSocket(context, f"ipc://{short}/clients")
    try:
        clients.open("tcp://127.0.0.1:0", 8, auth.own, CLIENT)
        for endpoint, keys in ((clients.own_endpoint, None), (clients.endpoint, ClientKeys(friend, auth.own.public))):
            with zmq.Context.instance().socket(zmq.DEALER) as socket:
                connect(socket, endpoint, keys)
                socket.send_multipart(encode(StatsQuery("s")))
                assert clients.socket.poll(WAIT_MS)
                assert [letter.key for letter in clients.receive(2)] == [friend.public if keys else ""]
    finally:
        clients.close()
        auth.close()
        context.destroy(linger=0)


def test_revoked_key_gets_no_further_request_on_its_open_connection(make_server, tmp_path, monkeypatch):
    ring, friend = Keyring(tmp_path / "keys"), make_pair()
    ring.make()
    ring.allow(AllowedKey(CLIENT, friend.public, "friend"))
    monkeypatch.setattr("outrider.orchestrator.sockets.sender_key", lambda _: friend.public)
    with zmq.Context() as context, closing(CurveAuth(context, ring)) as auth:
        server = make_server()
        server.sockets.auth = auth
        server.start()
        with RawClient(server.endpoint) as client:
            client.send(ask("q0"))
            server.core.wait_for(Admit, 1)
            ring.revoke("friend")
            client.send(ask("q1"))
            refused = client.receive_until(Failed)[-1]
            assert (refused.request, refused.kind) == ("q1", "KeyFault") and "outrider keys allow" in refused.message


def test_no_more_than_max_active_run_at_once(make_server):
    server = make_server(max_active=2).start()
    with RawClient(server.endpoint) as client:
        for serial in range(3):
            client.send(ask(f"q{serial}"))
        server.core.wait_for(Admit, 2)
        client.send(StatsQuery("s"))
        stats = client.receive_until(Stats)[-1]
        assert (stats.active, stats.queued) == (2, 1)


def test_full_queue_refuses_requests_until_it_is_shorter(make_server):
    server = make_server(max_active=2, max_waiting=3).start()
    with RawClient(server.endpoint) as client:
        for serial in range(7):
            client.send(ask(f"q{serial}"))
        server.core.wait_for(Admit, 2)
        refused = [client.receive_until(Failed)[-1] for _ in range(2)]
        assert [failed.request for failed in refused] == ["q5", "q6"]
        assert isinstance(make_error(refused[0].kind, refused[0].message), ServerBusy)
        assert "3 requests are already waiting" in refused[0].message and "try again later" in refused[0].message
        client.send(Cancel("q4"))
        client.send(ask("q7"))
        client.send(StatsQuery("s"))
        received = client.receive_until(Stats)
        assert not any(isinstance(message, Failed) for message in received) and received[-1].queued == 3


def test_a_full_queue_takes_one_request_of_each_other_client(make_server):
    """Up to twice `max_waiting`, so that clients can't fill the memory by connecting anew."""
    server = make_server(max_active=1, max_waiting=2).start()
    with ExitStack() as stack:
        greedy, *others = (stack.enter_context(RawClient(server.endpoint, new_client_id() + b"1")) for _ in range(4))
        for serial in range(4):
            greedy.send(ask(f"g{serial}"))
        assert greedy.receive_until(Failed)[-1].request == "g3"
        for number, client in enumerate(others):
            client.send(ask("first"))
            client.send(ask("second"))
            assert client.receive_until(Failed)[-1].request == ("second" if number < 2 else "first")
        greedy.send(StatsQuery("s"))
        stats = greedy.receive_until(Stats)[-1]
        assert stats.active + stats.queued == 5  # the first may run already


def test_server_near_its_connection_limit_refuses_only_new_requests(server, codec):
    with RawClient(server.endpoint) as client:
        client.send(ask("runs"))
        admit = server.core.wait_for(Admit)[0]
        server.sockets.endpoints[0].max_connections = 1
        client.send(ask("late"))
        assert "almost reached its connection limit" in client.receive_until(Failed)[-1].message
        for event in generates(codec, "fine")(admit):
            server.core.outbox.put(event)
        assert client.receive_until(Done)[-1].request == "runs"


def test_connections_with_keys_take_nothing_from_local_clients(make_server):
    """Peers without a key may use up all connections of a port until their handshakes fail."""
    server = make_server()
    server.sockets.open("tcp://127.0.0.1:0", 0)
    server.start()
    with RawClient(server.endpoint) as client:
        client.send(ask("local"))
        server.core.wait_for(Admit, 1)


def test_nothing_runs_before_the_workers_are_ready(make_server, codec):
    server = make_server().start(ready=False)
    server.core.on_admit = generates(codec, "x")
    with RawClient(server.endpoint) as client:
        client.send(ask())
        client.send(StatsQuery("s"))
        assert client.receive_until(Stats)[-1].queued == 1
        server.core.outbox.put(WorkersChanged((worker_stats("target", "starting"),), "target: reading weights"))
        server.core.outbox.put(WorkersChanged((worker_stats("target"),)))
        client.receive_until(Done)
    assert server.announced[0] == Stage("target: reading weights") and isinstance(server.announced[1], ServerReady)


def test_losing_a_drafter_does_not_stop_requests(server, codec):
    server.core.on_admit = generates(codec, "x")
    server.core.outbox.put(WorkersChanged((worker_stats("target"), worker_stats("draft", "lost"))))
    assert server.client().generate("x").text == "x"


def test_fatal_loss_fails_running_and_waiting_requests(server):
    with RawClient(server.endpoint) as client:
        client.send(ask("runs"))
        client.send(ask("waits"))
        server.core.wait_for(Admit)
        server.core.outbox.put(WorkersChanged((), fatal="the target is gone"))
        failed = {client.receive_until(Failed)[-1].request for _ in range(2)}
        assert failed == {"runs", "waits"}
        client.send(ask("late"))
        assert client.receive_until(Failed)[-1].message == "the target is gone"
    assert server.announced[-1] == Failure("WorkerError", "the target is gone")


def test_stopping_the_server_raises_in_waiting_clients(server):
    errors = []

    def wait():
        try:
            server.client().generate("x")
        except OutriderError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    server.core.wait_for(Admit)
    server.stop()
    thread.join(200)
    assert isinstance(errors[0], WorkerError) and "stopped" in str(errors[0])


def test_stats_report_workers_totals_and_dropped_messages(server, codec):
    server.core.on_admit = generates(codec, "a b c")
    server.client().generate("x")
    with pytest.raises(InvalidRequest):
        server.client().generate([99999])
    with RawClient(server.endpoint) as client:
        client.socket.send_multipart([b"rubbish"])
        client.send(Hello("target", "t", 1, "mlx", "m", 1, 1, 1, 1, incarnation=1))
        client.send(StatsQuery("s"))
        stats = client.receive_until(Stats)[-1]
    assert [worker.name for worker in stats.workers] == ["target-0", "draft-0"]
    assert (stats.finished, stats.failed, stats.active, stats.queued) == (1, 1, 0, 0)
    assert stats.totals.predicted_n == len(codec.encode("a b c", special=False)) + 1
    assert stats.stale_messages == 3 and stats.rejected_frames == 2 + 2
    assert stats.generated == stats.totals.predicted_n
    assert stats.endings == {"eos": 1, "InvalidRequest": 1}
    assert stats.round_seconds == Durations((3, 1), 2.0) and stats.verify_seconds == Durations()


def test_totals_may_exceed_a_single_requests_limits(server):
    many = Timings(prompt_n=2**31 - 1, predicted_n=2**31 - 1)
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ar"),
        RequestEnded(admit.request, "length", many),
    ]
    for _ in range(2):
        server.client().generate("x")
    assert server.client().stats().totals.prompt_n == 2**32 - 2


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Generate("q", None, None, SamplingParams()), "exactly one"),
        (Generate("q", "", None, SamplingParams()), "prompt is empty"),
        (Generate("q", None, np.zeros(0, np.int32), SamplingParams()), "prompt is empty"),
        (Generate("q", None, np.array([4096], np.int32), SamplingParams()), "expected ids from 0 to 4095"),
        (Generate("q", "x " * 2000, None, SamplingParams()), "> 1023 maximum"),
        (Generate("q", None, np.full(1024, 5, np.int32), SamplingParams()), "> 1023 maximum"),
        (Generate("q", "x", None, SamplingParams(logit_bias=((5000, 1.0),))), "logit_bias has token 5000"),
        (Generate("q", "x", None, SamplingParams(), num_draft_tokens=0), "num_draft_tokens is 0"),
        (Generate("q", "x", None, SamplingParams(), num_draft_tokens=1000), "from 1 to 32"),
        (Generate("q", "x", None, SamplingParams(), branches=100000), "from 1 to 256"),
        (ask(sampling=SamplingParams(grammar=Grammar.json_schema({"enum": []}))), "Unsatisfiable schema"),
        (ask(sampling=SamplingParams(grammar=Grammar("regex", "("))), "the regular expression can't be used"),
        (ask(sampling=SamplingParams(grammar=Grammar("grammar", "start: start"))), "can't be used: it allows no text"),
    ],
)
def test_invalid_request_is_refused_with_a_message(server, message, words):
    with RawClient(server.endpoint) as client:
        client.send(message)
        failed = client.receive()
    assert isinstance(failed, Failed) and isinstance(make_error(failed.kind, ""), InvalidRequest)
    assert words in failed.message


def test_longest_prompt_gets_the_remaining_context(server, codec):
    server.core.on_admit = generates(codec, "x", "length")
    result = server.client().generate([5] * 1023, SamplingParams(max_tokens=50))
    assert server.core.wait_for(Admit)[0].sampling.max_tokens == 1
    assert any("the context would be full" in note for note in result.notes)


def test_drafter_of_another_machine_may_be_chosen_where_one_may_join(make_server, codec):
    server = make_server(draft_backend="ngram", workers_endpoint="tcp://127.0.0.1:0").start()
    server.core.on_admit = generates(codec, "x")
    server.client().generate("x", mode="ssd", drafter="draft")
    assert server.core.wait_for(Admit)[0].drafter == "draft"


def test_drafter_of_another_machine_is_refused_where_none_may_join(make_server):
    with pytest.raises(InvalidRequest, match="no drafter is called 'draft' here; expected one of ngram"):
        make_server(draft_backend="ngram").start().client().generate("x", drafter="draft")


def test_modes_that_need_a_drafter_are_refused_without_one(make_server, codec):
    server = make_server(draft_backend="none").start()
    server.core.on_admit = generates(codec, "x")
    with pytest.raises(InvalidRequest, match="this server has none"):
        server.client().generate("x", mode="ssd")
    server.client().generate("x")
    assert server.core.wait_for(Admit)[0].mode == "ar"


def test_colocated_drafter_is_named_and_refuses_ssd(make_server, codec):
    server = make_server(colocate=True).start()
    server.core.on_admit = generates(codec, "x")
    with pytest.raises(InvalidRequest, match="take turns in one process; expected mode sd, ar or auto"):
        server.client().generate("x", mode="ssd")
    assert server.client().generate("x", mode="sd").draft_model.endswith("models/draft")


def test_out_of_range_sampling_on_the_wire_gets_an_error_reply(server):
    header = msgpack.decode(bytes(encode(ask())[0]))
    header[1]["sampling"]["temp"] = -1.0
    with RawClient(server.endpoint) as client:
        client.socket.send_multipart([msgpack.encode(header)])
        failed = client.receive()
    assert failed.request == "q" and "temp is -1.0" in failed.message
    assert isinstance(make_error(failed.kind, failed.message), InvalidRequest)


def test_other_protocol_version_gets_an_error_reply(server):
    header = msgpack.decode(bytes(encode(ask())[0]))
    header[0] = 999
    with RawClient(server.endpoint) as client:
        client.socket.send_multipart([msgpack.encode(header)])
        failed = client.receive()
    assert failed.kind == "VersionMismatch" and "999" in failed.message


def test_random_frames_do_not_affect_other_clients(server, codec):
    server.core.on_admit = generates(codec, "fine")
    with RawClient(server.endpoint) as client:
        for length in (0, 1, 7, 300):
            client.socket.send_multipart([os.urandom(length), os.urandom(5)])
        client.socket.send_multipart([bytes(encode(ask())[0])[:-9]])
        client.send(StatsQuery("s"))
        client.receive_until(Stats)
    assert server.client().generate("x").text == "fine"


def test_duplicate_request_name_is_refused_and_the_first_continues(server, codec):
    with RawClient(server.endpoint) as client:
        client.send(ask("same"))
        admit = server.core.wait_for(Admit)[0]
        client.send(ask("same"))
        assert "already running" in client.receive_until(Failed)[-1].message
        server.core.outbox.put(Committed(admit.request, codec.encode("on", special=False)))
        server.core.outbox.put(RequestEnded(admit.request, "length", Timings()))
        assert "".join(m.text for m in client.receive_until(Done) if isinstance(m, TextChunk)) == "on"


def test_chat_template_error_raises_model_error(server):
    object.__setattr__(server.admission._codec, "template", "{{ raise_exception('no users here') }}")
    with pytest.raises(ModelError, match="no users here"):
        server.client().generate("x")


@pytest.mark.parametrize("backend", ["mlx", "coreml", "ngram"])
def test_sampling_drafters_add_no_note_for_residual_sampling(make_server, codec, backend):
    server = make_server(draft_backend=backend).start()
    server.core.on_admit = generates(codec, "x")
    result = server.client().generate("x", SamplingParams(temp=1.0, rule="residual"))
    assert not any("does not sample" in note for note in result.notes)


def test_head_adds_a_note_for_residual_sampling(make_server, codec):
    server = make_server(draft_backend="mtp").start()
    server.core.on_admit = generates(codec, "x")
    for sampling, noted in ((SamplingParams(temp=1.0, rule="residual"), True), (SamplingParams(temp=1.0), False)):
        result = server.client().generate("x", sampling)
        assert any("does not sample" in note for note in result.notes) is noted


def test_flooding_client_is_refused_and_others_are_served(make_server, monkeypatch, caplog):
    monkeypatch.setattr("outrider.orchestrator.sockets.CLIENT_RATE", Rate(1e-6, 50))
    server = make_server().start()
    with RawClient(server.endpoint) as flooding, RawClient(server.endpoint) as modest:
        for number in range(200):
            flooding.send(StatsQuery(f"q{number}"))
        answers = [flooding.receive() for _ in range(200)]
        modest.send(StatsQuery("s"))
        assert isinstance(modest.receive(), Stats)
    refused = [answer for answer in answers if isinstance(answer, Failed)]
    assert len(refused) in (150, 151) and {answer.kind for answer in refused} == {"ServerBusy"}
    assert "more slowly" in refused[0].message
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 10, "floods must not fill the log"


def test_flooding_clients_together_do_not_fill_the_log(make_server, monkeypatch, caplog):
    monkeypatch.setattr("outrider.orchestrator.sockets.CLIENT_RATE", Rate(1e-6, 1))
    server = make_server().start()
    for _ in range(15):
        with RawClient(server.endpoint) as flooding:
            for number in range(3):
                flooding.send(StatsQuery(f"q{number}"))
            assert sum(isinstance(flooding.receive(), Failed) for _ in range(3)) == 2
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 10
