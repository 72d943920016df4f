"""Times of HTTP streams as their readers see them, requests at random times, and statistics of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.comparison.runs import Interval
from outrider.protocol.errors import WorkerError
from tools import http_cost
from tools.load import make_blocks
from tools.web.latency import draw, make_row, table
from tools.web.load_generator import TimedAnswer, poisson_arrivals
from tools.web.streams import StreamTimes, parse_stream


def event(text: str) -> bytes:
    return json.dumps({"choices": [{"text": text}]}).encode()


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 5}}).encode()
EVENTS = [(1.5, event("")), (2.0, event("a")), (3.0, event("bc")), (3.1, USAGE), (3.2, b"[DONE]\n")]


def test_stream_times_start_at_the_first_text_and_use_the_usage_tokens() -> None:
    assert parse_stream(1.0, EVENTS) == StreamTimes(1.0, 2.0, 3.1, 2, 5, "abc")


@pytest.mark.parametrize("events", [[], EVENTS[:-1], [(1.0, b'{"error": {}}'), (1.1, b"[DONE]")]])
def test_an_incomplete_stream_is_an_error(events: list[tuple[float, bytes]]) -> None:
    with pytest.raises(WorkerError, match="incomplete"):
        parse_stream(1.0, events)


def test_random_times_have_the_given_rate_and_repeat_with_the_seed() -> None:
    times = poisson_arrivals(4000, 5.0, "a")
    assert times == sorted(times) == poisson_arrivals(4000, 5.0, "a") != poisson_arrivals(4000, 5.0, "b")
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.1)


def test_load_blocks_cover_each_request_exactly_once() -> None:
    numbers = [
        block.begin + n
        for share in (0.7, 1.0)
        for block in make_blocks(2.0, 25, 10, share)
        for n in range(len(block.times))
    ]
    assert len(numbers) == len(set(numbers)) == 50


def answers(wait: float) -> list[TimedAnswer]:
    """Returns ten answers of 11 tokens that take a second each, one after another, and one that failed."""
    made = [TimedAnswer(StreamTimes(n, n + wait, n + 1.0, 6, 11, "x")) for n in range(10)]
    return [*made, TimedAnswer(None, "503: gone")]


def test_a_row_has_times_of_answered_requests_and_counts_errors(tmp_path: Path) -> None:
    found = [make_row(name, share, [answers(0.5), answers(0.5)]) for name in ("ar", "mlx-lm") for share in (0.7, 1.0)]
    one = found[0]
    assert one.rate.value == pytest.approx(11.0) and one.first_ms.p50.value == pytest.approx(500)
    assert one.token_ms.p99.value == pytest.approx(50) and (one.requests, len(one.errors)) == (22, 2)
    assert "| ar | 11 [11, 11] | 500 / 500 | 50.0 / 50.0 | 2 of 22 |" in table(found)
    draw(found, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def turn(wait: float, seconds: float, cpu_s: float) -> http_cost.Turn:
    return http_cost.Turn((StreamTimes(0.0, wait, seconds, 10, 40, "x"),), cpu_s)


def test_the_cost_of_http_is_compared_with_its_limits() -> None:
    found = {"http": [turn(0.004, 1.0, 0.002)] * 3, "client": [turn(0.001, 0.9, 0.0)] * 3}
    assert http_cost.rate_ratio(found).value == pytest.approx(0.9)
    assert http_cost.first_text_delay_ms(found).value == pytest.approx(3.0)
    assert http_cost.cpu_ms_per_chunk(found).value == pytest.approx(0.2)
    missed = [one.name for one in http_cost.check_limits("ar", found, found, 8) if not one.holds]
    assert len(missed) == 2 and all("tokens/s" in name for name in missed)
    assert str(http_cost.Result("x", Interval(1, 1, 1), " ms", "<= 0", False)).endswith("limit <= 0: MISSED")


def test_different_texts_over_http_and_client_are_an_error() -> None:
    other = http_cost.Turn((StreamTimes(0.0, 0.1, 1.0, 10, 40, "y"),), 0.0)
    with pytest.raises(WorkerError, match="texts differ"):
        http_cost.require_equal_texts({"http": [turn(0.1, 1.0, 0.0)], "client": [other]})
