"""The simulated network misbehaves as configured, by its seed only; without faults it is reliable."""

from __future__ import annotations

import random

import pytest

from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Close, Message
from tests.network.transport import CLEAR, Journal, Way, Weather, altered

NAMES = [f"r{n}" for n in range(200)]


def arrived(weather: Weather, sealed: bool = True, ticks: int = 20, seed: int = 1) -> list[str]:
    """Returns which of 200 messages arrive, sent one a tick."""
    journal = Journal()
    way = Way("a -> b", random.Random(seed), journal, sealed)
    way.weather = weather
    received: list[Message] = []
    for name in NAMES:
        way.put(Close(name))
        journal.tick += 1
        received += way.arrived()
    for _ in range(ticks):
        journal.tick += 1
        received += way.arrived()
    return [message.request for message in received if isinstance(message, Close)]


def test_messages_arrive_once_and_in_order_without_faults() -> None:
    assert arrived(CLEAR) == NAMES
    assert arrived(Weather(delay=7)) == NAMES


def test_each_fault_has_only_its_own_effect() -> None:
    lost = arrived(Weather(lose=0.2))
    assert 100 < len(lost) < 190 and lost == sorted(lost, key=NAMES.index)
    twice = arrived(Weather(twice=0.2))
    assert set(twice) == set(NAMES) and 210 < len(twice) < 290
    overtaken = arrived(Weather(overtake=0.5, delay=7))
    assert sorted(overtaken) == sorted(NAMES) and overtaken != NAMES
    assert len(arrived(Weather(alter=0.5))) < 150


def test_same_seed_gives_the_same_faults() -> None:
    storm = Weather(0.1, 0.2, 0.3, 0.1, 5)
    assert arrived(storm) == arrived(storm) != arrived(storm, seed=2)


def test_cut_link_holds_messages_and_a_lost_connection_drops_them() -> None:
    journal = Journal()
    way = Way("a -> b", random.Random(0), journal, sealed=True)
    way.cut = True
    way.put(Close("a"), Close("b"))
    journal.tick += 5
    assert way.arrived() == []
    way.cut = False
    assert way.arrived() == [Close("a"), Close("b")]
    way.put(Close("c"))
    way.lose_all()
    journal.tick += 5
    assert way.arrived() == [] and way.is_empty


def test_altered_messages_arrive_only_on_unsealed_links() -> None:
    assert set(arrived(Weather(alter=0.5))) <= set(NAMES)
    lies = {name for seed in range(9) for name in arrived(Weather(alter=1.0), sealed=False, seed=seed)} - set(NAMES)
    assert lies, "an altered name is still a name"


@pytest.mark.parametrize("seed", range(200))
def test_altered_frames_are_decoded_or_raise_protocol_error(seed: int) -> None:
    rng = random.Random(seed)
    frames = altered([bytes(frame) for frame in encode_all([Close("abc"), Close("d")])], rng)
    try:
        assert decode_all(frames)
    except ProtocolError as error:
        assert str(error)
