"""A peer's rate limit: a reserve, a rate, and bytes that count; other peers notice nothing."""

from __future__ import annotations

from outrider.orchestrator.sockets import BYTES, MOST_PEERS, Rate, RateLimiter
from outrider.protocol.clock import SECOND_NS

A, B = b"a", b"b"


def taken(allowance: RateLimiter, peer: bytes, seconds: float, count: int, frames: tuple[bytes, ...] = (b"x",)) -> int:
    return sum(allowance.allow(peer, frames, int(seconds * SECOND_NS)) for _ in range(count))


def test_a_reserve_at_once_then_so_much_a_second() -> None:
    allowance = RateLimiter(Rate(10, 40))
    assert taken(allowance, A, 0, 100, (b"",)) == 40
    assert taken(allowance, A, 0.5, 100) in (4, 5)
    assert sum(taken(allowance, A, 1 + second, 100) for second in range(10)) in range(95, 106)
    assert taken(allowance, A, 1000, 100) in (39, 40)


def test_who_floods_takes_nothing_from_others() -> None:
    allowance = RateLimiter(Rate(10, 40))
    taken(allowance, A, 0, 1000)
    assert taken(allowance, B, 0, 40, (b"",)) == 40


def test_long_messages_count_as_several_and_one_of_any_size_may_pass() -> None:
    allowance = RateLimiter(Rate(10, 40))
    assert taken(allowance, A, 0, 100, (b"x" * 9 * BYTES,)) in (3, 4)
    assert taken(allowance, B, 0, 100, (bytes(100 * BYTES),)) == 1
    assert taken(allowance, B, 1, 100) == 0, "what it took is to be made up for"


def test_a_refusal_is_told_once_until_there_was_quiet() -> None:
    allowance = RateLimiter(Rate(10, 40))
    taken(allowance, A, 0, 41)
    assert [allowance.is_first(A) for _ in range(3)] == [True, False, False]
    taken(allowance, A, 100, 41)
    assert allowance.is_first(A)


def test_who_was_quiet_for_long_is_forgotten() -> None:
    allowance = RateLimiter(Rate(10, 40))
    for number in range(5 * MOST_PEERS):
        assert allowance.allow(str(number).encode(), (b"x",), number * SECOND_NS // 100)
    assert len(allowance._full_ns) <= MOST_PEERS + 1
