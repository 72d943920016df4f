"""`/metrics` counts the answers: names, types and labels for Prometheus, and counts equal to the timings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.protocol import errors
from outrider.protocol.messages import Stats, Timings, WorkerStats
from outrider.server.metrics import ERROR_KINDS, process_metrics
from tests.server.running_server import RunningServer

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
TALK = [{"role": "user", "content": "hi"}]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics(server: RunningServer) -> str:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


def samples(server: RunningServer) -> Samples:
    """Returns values by name and labels, without the model's label."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics(server)):
        for sample in family.samples:
            labels = frozenset(item for item in sample.labels.items() if item[0] != "model_name")
            found[sample.name.removeprefix("outrider:"), labels] = sample.value
    return found


def value_of(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def complete(server: RunningServer, **asked: Any) -> Any:
    body = {"prompt": "def fibonacci(n):", "max_tokens": 40, **asked}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=200).json()


def test_names_types_and_helps_follow_prometheus_conventions(pair: RunningServer) -> None:
    families = list(text_string_to_metric_families(metrics(pair)))
    assert len({family.name for family in families}) == len(families) > 40
    for family in families:
        assert family.name.startswith("outrider:") and family.documentation[0].isupper()
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert not any(word in family.name for word in ("_ms", "_mb", "milliseconds"))
        if family.type == "counter":
            assert {sample.name.removeprefix(family.name) for sample in family.samples} <= {"_total"}, family.name
        if family.type == "histogram" and not family.name.endswith("_tokens"):
            assert family.name.endswith("_seconds")


def test_every_metric_is_documented(pair: RunningServer) -> None:
    """By its full name, or, for metrics by position, by the end of it."""
    for family in text_string_to_metric_families(metrics(pair)):
        name = family.name.removeprefix("outrider:") + ("_total" if family.type == "counter" else "")
        known = f"`{name}`" in PAGE or ("_per_pos" in name and "_per_pos_total`" in PAGE)
        assert known, f"docs/server.md has no line for {name} under Metrics"


def test_failures_are_counted_by_errors_only() -> None:
    assert "WorkerError" in ERROR_KINDS
    assert all(issubclass(getattr(errors, name), errors.OutriderError) for name in ERROR_KINDS)


def test_histograms_are_cumulative_and_complete(pair: RunningServer) -> None:
    complete(pair)
    for family in text_string_to_metric_families(metrics(pair)):
        if family.type != "histogram":
            continue
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert buckets[-1].labels["le"] == "+Inf" and buckets[-1].value == count > 0, family.name
        assert all(a.value <= b.value and float(a.labels["le"]) < float(b.labels["le"]) for a, b in pairwise(buckets))


def test_counters_equal_the_timings_of_the_answers(pair: RunningServer) -> None:
    before = samples(pair)
    answers = [complete(pair, speculation={"mode": mode}) for mode in ("ar", "sd", "ssd")]
    while len(answers) < 30 and not any(answer["timings"]["draft_n_accepted"] for answer in answers):
        answers.append(complete(pair, speculation={"mode": "sd"}))
    after = samples(pair)
    times = [answer["timings"] for answer in answers]

    def grew(name: str, **labels: str) -> float:
        series = name, frozenset(labels.items())
        return after.get(series, 0.0) - before.get(series, 0.0)

    def total(name: str) -> float:
        return sum(one[name] for one in times)

    for name, field in {
        "generation_tokens": "predicted_n",
        "prompt_tokens": "prompt_n",
        "prefix_cache_hits": "cache_n",
        "rounds": "rounds",
        "spec_decode_num_drafts": "draft_rounds",
        "spec_decode_num_draft_tokens": "draft_n",
        "spec_decode_num_accepted_tokens": "draft_n_accepted",
        "speculation_cache_hits": "cache_hits",
    }.items():
        assert grew(f"{name}_total") == total(field), name
    assert total("draft_n_accepted") > 0 and total("cache_hits") + total("cache_misses") > 0
    misses = {
        "branch": "cache_late",
        "plain": "missed_then_plain",
        "copied": "missed_then_copied",
        "drafted": "missed_then_drafted",
    }
    for followed, field in misses.items():
        assert grew("speculation_cache_misses_total", followed_by=followed) == total(field), followed
    assert total("cache_misses") == sum(total(field) for field in misses.values())
    places = max(len(one["drafted_by_position"]) for one in times)
    at = [grew("spec_decode_num_draft_tokens_per_pos_total", position=str(place)) for place in range(places)]
    assert sum(at) == total("draft_n") and at[0] >= at[-1]
    assert grew("request_success_total", finished_reason="length") == len(answers)
    assert grew("http_requests_total", path="/v1/completions", status="200") == len(answers)
    assert value_of(after, "http_choices_running") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                 "request_generation_tokens"):  # fmt: skip
        assert grew(f"{name}_count") == len(answers), name
    assert grew("request_generation_tokens_sum") == total("predicted_n")
    assert grew("request_decode_time_seconds_sum") == pytest.approx(total("predicted_ms") / 1000)
    # Each request's rounds but the first, which reads the prompt; one at a time, a forward has one outcome.
    rounds = total("rounds") - len(answers)
    assert ("round_duration_seconds_bucket", frozenset({("le", "0.0005")})) in after
    assert grew("round_duration_seconds_count") == grew("verify_duration_seconds_count") == rounds
    assert grew("verify_duration_seconds_sum") == pytest.approx(total("verify_ms") / 1000)


def test_finishes_and_errors_are_counted_by_kind(pair: RunningServer) -> None:
    before = samples(pair)
    complete(pair, stop=["e"])
    complete(pair, prompt=[5] * 100_000)
    after = samples(pair)
    for name, labels in (("request_success", {"finished_reason": "stop"}),
                         ("request_failure", {"error": "PromptTooLong"})):  # fmt: skip
        assert value_of(after, f"{name}_total", **labels) == value_of(before, f"{name}_total", **labels) + 1


def test_no_label_holds_text_from_a_request(chat: RunningServer) -> None:
    for path in ("/nowhere/at/all", "/v1/models/nobody's", "/models/nobody's", "/v1/chat/completions/x", "/%ff"):
        assert httpx.get(f"{chat.url}{path}").status_code == 404
    httpx.post(f"{chat.url}/v1/chat/completions", json={"model": "typed", "messages": TALK})
    text = metrics(chat)
    assert not any(word in text for word in ("nowhere", "nobody", "typed", "%ff"))
    assert value_of(samples(chat), "http_requests_total", path="/v1/models/{name}", status="404") >= 1
    assert value_of(samples(chat), "http_requests_total", path="other", status="404") >= 2
    assert value_of(samples(chat), "http_requests_total", path="/models/{name}", status="404") >= 1


def test_each_worker_is_in_one_state(chat: RunningServer) -> None:
    found = {labels: value for (name, labels), value in samples(chat).items() if name == "worker_state"}
    ready = [dict(labels) for labels, value in found.items() if value == 1]
    assert sorted(one["worker"] for one in ready) == ["draft-0", "target-0"]
    assert {one["state"] for one in ready} == {"ready"} and len(found) == 12


def test_process_metrics_cover_all_processes_of_the_server(pair: RunningServer) -> None:
    found = samples(pair)
    for process in ("http", "orchestrator", "target-0", "draft-0"):
        assert value_of(found, "process_resident_memory_bytes", process=process) > 2**20
        assert value_of(found, "process_cpu_seconds_total", process=process) > 0
        assert value_of(found, "process_open_fds", process=process) > 2


def test_remote_worker_has_no_process_metrics() -> None:
    """Its process id may be that of an unrelated process here."""
    remote = WorkerStats("draft", "far", 1, "mlx", "m", 1, 1, 1, 1, state="ready")
    stats = Stats("", "0", (remote,), 0, 0, 0, 0, Timings(), 0, 0)
    for family in process_metrics(stats):
        assert {sample.labels["process"] for sample in family.samples} == {"http", "orchestrator"}
