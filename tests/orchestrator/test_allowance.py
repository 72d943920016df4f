"""A peer's rate limit: a burst, then a steady rate; long messages count as several; other peers are not affected."""

from __future__ import annotations

from outrider.orchestrator.sockets import BYTES_PER_MESSAGE, MIN_PEERS_TO_FORGET, Rate, RateLimiter
from outrider.protocol.clock import SECOND_NS

A, B = b"a", b"b"


def allowed_count(
    limiter: RateLimiter, peer: bytes, seconds: float, count: int, frames: tuple[bytes, ...] = (b"x",)
) -> int:
    return sum(limiter.allow(peer, frames, int(seconds * SECOND_NS)) for _ in range(count))


def test_burst_is_allowed_then_the_steady_rate() -> None:
    limiter = RateLimiter(Rate(10, 40))
    assert allowed_count(limiter, A, 0, 100, (b"",)) == 40
    assert allowed_count(limiter, A, 0.5, 100) in (4, 5)
    assert sum(allowed_count(limiter, A, 1 + second, 100) for second in range(10)) in range(95, 106)
    assert allowed_count(limiter, A, 1000, 100) in (39, 40)


def test_flooding_peer_does_not_use_up_others_limits() -> None:
    limiter = RateLimiter(Rate(10, 40))
    allowed_count(limiter, A, 0, 1000)
    assert allowed_count(limiter, B, 0, 40, (b"",)) == 40


def test_long_messages_count_as_several_but_one_of_any_size_passes() -> None:
    limiter = RateLimiter(Rate(10, 40))
    assert allowed_count(limiter, A, 0, 100, (b"x" * 9 * BYTES_PER_MESSAGE,)) in (3, 4)
    assert allowed_count(limiter, B, 0, 100, (bytes(100 * BYTES_PER_MESSAGE),)) == 1
    assert allowed_count(limiter, B, 1, 100) == 0, "later messages pay for the long one"


def test_peers_quiet_for_long_are_forgotten() -> None:
    limiter = RateLimiter(Rate(10, 40))
    for number in range(5 * MIN_PEERS_TO_FORGET):
        assert limiter.allow(str(number).encode(), (b"x",), number * SECOND_NS // 100)
    assert len(limiter._full_ns) <= MIN_PEERS_TO_FORGET + 1
