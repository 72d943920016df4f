"""KV memory is divided by need, requests wait until theirs fits, and impossible ones are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from outrider.orchestrator.events import Admit, KVBudget, Stop, WorkersChanged, kv_budget
from outrider.orchestrator.front.admission import Admission
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Cancel, Generate
from outrider.protocol.process import cpu_quota, physical_memory
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost, KvUse
from tests.orchestrator.scripted_server import worker_stats
from tests.orchestrator.test_front import RawClient

TARGET, DRAFT = KvCost(0, 30), KvCost(1000, 10)
WORKERS = (replace(worker_stats("target"), kv=TARGET), replace(worker_stats("draft"), kv=DRAFT))


def ask(name, prompt="x", **sampling):
    return Generate(name, prompt, None, SamplingParams(**sampling))


def test_budget_shares_hold_the_same_tokens_in_both_workers():
    budget = kv_budget(41_000, WORKERS, memory=0)
    assert budget == KVBudget(41_000, KvCost(1000, 40)) and budget.max_tokens == 1000
    shares = [budget.share(cost, 1000) for cost in (TARGET, DRAFT)]
    assert shares == [TARGET.of(1000), DRAFT.of(1000)]
    assert budget.max_texts(450) == 2 and budget.max_texts(5000) == 1


def test_default_limit_is_half_of_the_memory_left_by_weights():
    heavy = tuple(replace(worker, weight_bytes=300) for worker in WORKERS)
    assert kv_budget(None, heavy, memory=1000).limit == 200
    gone = (heavy[0], replace(heavy[1], state="lost"))
    assert kv_budget(None, gone, memory=1000) == KVBudget(350, TARGET)
    assert kv_budget(None, heavy, memory=100).limit == 0
    assert KVBudget(100, KvCost()).max_tokens > 10**9, "texts that need no memory are not limited"


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/", "memory.max"),  # a container
        ("0::/docker/abc", "memory.max"),  # a container that sees its group's name, but no groups above it
        ("0::/system.slice/x.service", "system.slice/x.service/memory.max"),
        ("0::/job/step/user:a", "job/memory.max"),
        ("5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/", "memory/memory.limit_in_bytes"),  # version 1
        ("4:memory:/job/step\n0::/", "memory/job/memory.limit_in_bytes"),
    ],
)
def test_physical_memory_respects_the_limits_of_control_groups(tmp_path: Path, own: str, file: str):
    groups = tmp_path / "groups"
    (tmp_path / "own").write_text(f"{own}\n")
    without = physical_memory(groups, tmp_path / "none")
    limit = groups / file
    limit.parent.mkdir(parents=True)
    limit.write_text("12345\n")
    assert physical_memory(groups, tmp_path / "own") == 12345
    assert physical_memory(groups, tmp_path / "none") == without > 2**20
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        limit.write_text(unlimited)
        assert physical_memory(groups, tmp_path / "own") == without


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/x", {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/", {}, math.inf),
    ],
)
def test_cpu_quota_is_the_smallest_limit_of_control_groups(
    tmp_path: Path, own: str, files: dict[str, str], cpus: float
) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == cpus


def test_request_waits_until_its_text_fits_beside_the_others(make_server):
    """Slots are free, but memory for three texts is not."""
    server = make_server(max_active=8).start(ready=False)
    limit = 2 * KvCost(1000, 40).of(50)
    server.queues.events.put(WorkersChanged(WORKERS, kv_budget=kv_budget(limit, WORKERS, 0)))
    with RawClient(server.endpoint) as client:
        for name in ("a", "b", "c"):
            client.send(ask(name, max_tokens=48))
        assert len(server.core.wait_for(Admit, 2)) == 2
        kv = server.client().stats().kv
        assert kv == KvUse(limit, 2 * KvCost(1000, 40).of(2), limit), (
            "the prompts are used, and both whole texts are reserved"
        )
        assert KvCost(1000, 40).of(50) == limit // 2
        client.send(ask("d", max_tokens=1))
        client.send(Cancel("a"))
        server.core.wait_for(Admit, 3)
    events = [event.request for event in server.core.received if isinstance(event, Admit | Stop)][:4]
    assert events == ["r1", "r2", "r1", "r3"], "the third begins when the first is stopped, and before the fourth"


def test_texts_in_rows_of_equal_length_each_take_as_much_as_the_longest(make_server):
    """With MLX, a long text makes the rows of all others as long."""
    workers = (replace(WORKERS[0], kv=replace(TARGET, padded=True)), WORKERS[1])
    limit = 2 * KvCost(1000, 40).of(50)
    server = make_server(max_active=8).start(ready=False)
    server.queues.events.put(WorkersChanged(workers, kv_budget=kv_budget(limit, workers, 0)))
    with RawClient(server.endpoint) as client:
        for name, tokens in (("long", 48), ("short", 8), ("second short", 8)):
            client.send(ask(name, max_tokens=tokens))
        assert len(server.core.wait_for(Admit, 2)) == 2
        assert server.client().stats().kv == KvUse(limit, 2 * KvCost(1000, 40).of(2), limit)
        client.send(Cancel("long"))
        server.core.wait_for(Admit, 3)
    events = [event.request for event in server.core.received if isinstance(event, Admit | Stop)][:4]
    assert events == ["r1", "r2", "r1", "r3"], "the second short text begins when the long one is stopped"


def test_oversized_prompt_is_refused_and_oversized_output_is_cut(server, codec):
    server.core.on_admit = lambda admit: []
    budget = kv_budget(KvCost(1000, 40).of(20), WORKERS, 0)
    server.queues.events.put(WorkersChanged(WORKERS, kv_budget=budget))
    while server.admission.kv_budget == KVBudget():
        server.client().stats()
    with pytest.raises(InvalidRequest, match=r"too long: 20 tokens > 19 maximum; .* in kv_memory \(1\.8 KB\)"):
        server.client().generate([5] * 20)
    with RawClient(server.endpoint) as client:
        client.send(Generate("a", "x", None, SamplingParams(max_tokens=300)))
        (admit,) = server.core.wait_for(Admit)
    assert len(admit.tokens) + admit.sampling.max_tokens == 20
    notes = server.admission.accept(ask("b", max_tokens=300), "r9").notes
    assert any("kv_memory (1.8 KB) would be full" in note for note in notes)


@pytest.mark.parametrize(("max_active", "expected"), [(None, (1, 1, 3, 16)), (40, (40, 40, 40, 40))])
def test_default_max_active_is_what_memory_holds_up_to_a_cap(max_active, expected):
    pair = choose_pair(ServeSettings(max_active=max_active))
    admission = Admission(pair, load_pair(pair))
    admission.context_length = 100_000
    for texts, most in zip((0, 1, 3, 1000), expected, strict=True):
        admission.kv_budget = kv_budget(texts * KvCost(1000, 40).of(4096), WORKERS, 0)
        assert admission.max_active == most
