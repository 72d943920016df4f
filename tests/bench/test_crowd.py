"""Concurrent requests: latencies of clients, total rates, and the input that a bench refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.bench.comparison.report import draw_concurrent_runs, format_concurrent_runs
from outrider.bench.comparison.runs import Arrival, Reply, time_replies
from outrider.orchestrator.cli import main
from outrider.orchestrator.client.dialogue import Chunk
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tests.harness.requests import TimedRequest, longest_wait, send_all

SAMPLING = SamplingParams(max_tokens=6)


def reply(sent: float, *arrivals: tuple[float, int]) -> Reply:
    return Reply(sent, tuple(Arrival(*arrival) for arrival in arrivals))


def make_rounds(speed: float) -> list[list[Reply]]:
    """Returns three rounds of two requests, each with 4 tokens in `4 / speed` seconds."""
    return [[reply(n, (n + 1 / speed, 1), (n + 4 / speed, 3)) for _ in range(2)] for n in range(3)]


def test_wait_for_a_chunk_is_divided_among_its_tokens() -> None:
    found = reply(1.0, (1.5, 1), (1.6, 1), (1.9, 3))
    assert found.first_ms == pytest.approx(500)
    assert found.gaps_ms == pytest.approx([100, 300])
    assert found.token_ms == pytest.approx([100, 100, 100, 100])


def test_total_rate_spans_first_send_to_last_arrival() -> None:
    found = time_replies([reply(1.0, (1.5, 1), (2.0, 4)), reply(1.2, (3.0, 5))])
    assert (found.tokens, found.seconds) == (10, 2.0)


def test_modes_are_compared_with_the_peer_and_auto_with_the_best() -> None:
    table = format_concurrent_runs(
        2, 0.8, {"ar": make_rounds(10), "ssd": make_rounds(20), "auto": make_rounds(15), "mlx-lm": make_rounds(40)}
    )
    assert table.startswith("2 concurrent requests, T = 0.8, 3 rounds\n") and "relative to mlx-lm" in table
    assert "| ar | 20 [20, 20] | 0.25 [0.25, 0.25] | 100 / 100 | 100.0 / 100.0 |" in table
    assert "| ssd | 40 [40, 40] | 0.50 [0.50, 0.50] | 50 / 50 | 50.0 / 50.0 |" in table
    assert "| mlx-lm | 80 [80, 80] |  |" in table
    assert table.endswith("\n- auto over ssd, the best fixed mode: 0.75 [0.75, 0.75]")


def test_total_rates_are_drawn() -> None:
    (axes,) = draw_concurrent_runs({"2 concurrent requests": {"ar": make_rounds(10), "auto": make_rounds(15)}}).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([20, 30])


def test_latency_percentiles_are_of_all_rounds() -> None:
    rounds = [[reply(0, (0.1, 1), (0.2, 1)), reply(0, (0.3, 1), (0.6, 1))], [reply(0, (0.5, 1), (0.7, 1))] * 2]
    assert "| 400 / 500 | 200.0 / 297.0 |" in format_concurrent_runs(2, 0.0, {"ar": rounds})


def test_modes_are_compared_with_the_first_one_without_a_peer() -> None:
    table = format_concurrent_runs(1, 0.0, {"ar": make_rounds(10), "sd": make_rounds(12)})
    assert "relative to ar" in table and "| 1.20 [1.20, 1.20] |" in table and "the best fixed mode" not in table


class OneTokenPerChunkClient:
    """A client whose stream has one token per chunk, and a last chunk without any."""

    def stream(self, tokens: tuple[int, ...], sampling: SamplingParams, **_: Any) -> Any:
        class Result:
            token_ids, text, finish_reason = (7,) * sampling.max_tokens, "x" * sampling.max_tokens, "length"

        class Chunks(list[Chunk]):
            result = Result

        return Chunks([Chunk("x", (7,)) for _ in range(sampling.max_tokens)] + [Chunk("", ())])


def test_client_records_arrival_times_and_can_cancel() -> None:
    whole, left = send_all(
        OneTokenPerChunkClient(), [TimedRequest((1,), SAMPLING, "ar"), TimedRequest((1,), SAMPLING, "ar", until=2)]
    )  # type: ignore[arg-type]
    assert (len(whole.arrivals), whole.reason, whole.cancelled) == (6, "length", False)
    assert (left.token_ids, left.text, left.cancelled) == ((7, 7), "xx", True)
    assert whole.sent < whole.arrivals[0].at <= whole.ended


def test_longest_wait_begins_at_the_given_time() -> None:
    arrivals = [Arrival(1.0, 1), Arrival(3.0, 2), Arrival(3.5, 1)]
    assert [longest_wait(arrivals, since) for since in (0.5, 2.5, 3.2, 4.0)] == pytest.approx([2.0, 0.5, 0.3, 0.0])


@pytest.fixture
def forbid_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.bench.commands.bench.LocalCluster", lambda **_: pytest.fail("processes were started"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("forbid_processes")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "many"], "concurrency is 'many'; expected comma-separated numbers"),
        (["--concurrency", "4,0"], "concurrency is 0; expected a whole number from 1 to 256"),
        (["--concurrency", "4", "--modes", "ar,fast"], "modes is 'fast'; expected"),
        (["--concurrency", "4", "--rounds", "1"], "rounds is 1; expected a whole number from 2"),
        (["--concurrency", "4", "--classes", "poems"], "unknown class 'poems'"),
        (["--concurrency", "4", "--depths", "2"], "depths can't be combined with concurrency"),
        (["--rounds", "4"], "rounds is only used with concurrency"),
    ],
)
def test_invalid_concurrency_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["bench", *arguments]) == InvalidRequest.exit_code
    message = capsys.readouterr().err.strip()
    assert message.startswith("outrider bench: ") and words in message and len(message.splitlines()) == 1
