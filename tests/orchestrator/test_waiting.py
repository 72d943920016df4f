"""The fair queue: which client is next."""

from __future__ import annotations

from outrider.orchestrator.front.admission import FairQueue


def drain(queue):
    return [queue.take() for _ in range(len(queue))]


def test_clients_take_turns_and_each_keeps_its_own_order():
    queue = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put((item[0].encode(),), item)
    assert drain(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_new_client_waits_behind_clients_not_yet_served():
    queue = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.put((item[0].encode(),), item)
    assert queue.take() == "a1"
    queue.put((b"c",), "c1")
    assert drain(queue) == ["b1", "a2", "c1"]


def test_dropped_item_is_not_served():
    queue = FairQueue()
    for item in ("a1", "a2"):
        queue.put((b"a",), item)
    assert queue.drop((b"a",), "a1") and not queue.drop((b"a",), "a1") and not queue.drop((b"b",), "a2")
    assert len(queue) == 1 and drain(queue) == ["a2"] and len(queue) == 0


def test_users_of_one_gateway_share_its_turns():
    """The users of a gateway take turns among themselves, and the gateway takes turns with other clients."""
    queue = FairQueue()
    for client, item in (
        ((b"gate", b"x"), "x1"),
        ((b"gate", b"x"), "x2"),
        ((b"gate", b"y"), "y1"),
        ((b"alone",), "a1"),
        ((b"alone",), "a2"),
        ((b"gate", b"y"), "y2"),
    ):
        queue.put(client, item)
    assert queue.peek() == "x1" and len(queue) == 6
    assert queue.drop((b"gate", b"y"), "y2") and not queue.drop((b"gate", b"z"), "y2")
    assert drain(queue) == ["x1", "a1", "y1", "a2", "x2"]


def test_first_item_goes_ahead_at_every_level_of_the_queue():
    queue = FairQueue()
    queue.put((b"a",), "a1")
    queue.put((b"gate", b"x"), "x1")
    queue.put((b"gate", b"y"), "y0", first=True)
    assert drain(queue) == ["y0", "a1", "x1"]
