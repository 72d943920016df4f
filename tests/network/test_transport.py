"""The simulated network has the configured faults, determined by its seed; without faults it is reliable."""

from __future__ import annotations

import random

import pytest

from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Close, Message
from tests.network.transport import NO_FAULTS, EventLog, LinkFaults, OneWayLink, corrupted

NAMES = [f"r{n}" for n in range(200)]


def received(faults: LinkFaults, authenticated: bool = True, ticks: int = 20, seed: int = 1) -> list[str]:
    """Sends 200 messages, one a tick, and returns those that arrive."""
    log = EventLog()
    direction = OneWayLink("a -> b", random.Random(seed), log, authenticated)
    direction.faults = faults
    received: list[Message] = []
    for name in NAMES:
        direction.send(Close(name))
        log.tick += 1
        received += direction.receive()
    for _ in range(ticks):
        log.tick += 1
        received += direction.receive()
    return [message.request for message in received if isinstance(message, Close)]


def test_messages_arrive_once_and_in_order_without_faults() -> None:
    assert received(NO_FAULTS) == NAMES
    assert received(LinkFaults(delay=7)) == NAMES


def test_each_fault_has_only_its_own_effect() -> None:
    lost = received(LinkFaults(drop=0.2))
    assert 100 < len(lost) < 190 and lost == sorted(lost, key=NAMES.index)
    duplicate = received(LinkFaults(duplicate=0.2))
    assert set(duplicate) == set(NAMES) and 210 < len(duplicate) < 290
    overtaken = received(LinkFaults(reorder=0.5, delay=7))
    assert sorted(overtaken) == sorted(NAMES) and overtaken != NAMES
    assert len(received(LinkFaults(corrupt=0.5))) < 150


def test_same_seed_gives_the_same_faults() -> None:
    storm = LinkFaults(0.1, 0.2, 0.3, 0.1, 5)
    assert received(storm) == received(storm) != received(storm, seed=2)


def test_cut_link_holds_messages_and_a_lost_connection_drops_them() -> None:
    log = EventLog()
    direction = OneWayLink("a -> b", random.Random(0), log, authenticated=True)
    direction.cut = True
    direction.send(Close("a"), Close("b"))
    log.tick += 5
    assert direction.receive() == []
    direction.cut = False
    assert direction.receive() == [Close("a"), Close("b")]
    direction.send(Close("c"))
    direction.drop_all()
    log.tick += 5
    assert direction.receive() == [] and direction.is_empty


def test_corrupted_messages_arrive_only_on_unauthenticated_links() -> None:
    assert set(received(LinkFaults(corrupt=0.5))) <= set(NAMES)
    corrupt = LinkFaults(corrupt=1.0)
    forged = {name for seed in range(9) for name in received(corrupt, authenticated=False, seed=seed)} - set(NAMES)
    assert forged, "a corrupted name is still decoded as a name"


@pytest.mark.parametrize("seed", range(200))
def test_corrupted_frames_are_decoded_or_raise_protocol_error(seed: int) -> None:
    rng = random.Random(seed)
    frames = corrupted([bytes(frame) for frame in encode_all([Close("abc"), Close("d")])], rng)
    try:
        assert decode_all(frames)
    except ProtocolError as error:
        assert str(error)
