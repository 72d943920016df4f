"""Target here, drafter on another host: the text is the same whatever the link does, and the drafter comes back.

The hosts are network namespaces that the test makes; only the worker's own command joins them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider import Client, Origin, SamplingParams
from outrider.bench.two_hosts import namespace
from outrider.bench.two_hosts.drafter import NAME, far_cluster, state
from outrider.bench.two_hosts.hosts import TwoHosts
from outrider.orchestrator.client.result import Chunk

WHY_NOT = namespace.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

PROMPT = "def fibonacci(n):"
SAMPLED = SamplingParams(max_tokens=60, temp=0.8, seed=5, ignore_eos=True)
LONG = replace(SAMPLED, max_tokens=1000)
DRAFTED = {Origin.PREPARED, Origin.DRAFTED}


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


@pytest.fixture(scope="module")
def client(hosts: TwoHosts) -> Iterator[Client]:
    """Of a cluster whose only drafter is on the other host, and both have keys."""
    with far_cluster(hosts, max_active=2) as known:
        yield known


def is_drafted(chunk: Chunk) -> bool:
    return not DRAFTED.isdisjoint(chunk.origins or ())


@pytest.fixture(scope="module")
def whole(client: Client) -> tuple[int, ...]:
    return client.generate(PROMPT, SAMPLED, mode="ar").token_ids


@pytest.mark.parametrize(("rtt_ms", "loss"), [(0.2, 0.0), (2, 0.01), (20, 0.01)])
def test_a_text_is_the_same_over_any_link(
    hosts: TwoHosts, client: Client, whole: tuple[int, ...], rtt_ms: float, loss: float
) -> None:
    hosts.shape(rtt_ms, loss)
    assert client.generate(PROMPT, SAMPLED, mode="ssd").token_ids == whole


def test_a_link_is_cut_and_healed_in_the_middle_of_a_text(hosts: TwoHosts, client: Client) -> None:
    hosts.shape(2)
    before, tokens = client.stats().totals.rejoined, list[int]()
    happens = deque([
        (is_drafted, hosts.cut),
        (lambda _: state(client, NAME) == "frozen", hosts.heal),
        (is_drafted, lambda: None),
    ])  # fmt: skip
    for chunk in client.stream(PROMPT, LONG, mode="ssd", origins=True):
        tokens += chunk.token_ids
        if happens[0][0](chunk):
            happens.popleft()[1]()
        if not happens:
            break
    assert not happens, "the drafter did not come back into the text"
    for _ in range(1000):  # the request ends once its reader's leaving is heard
        if client.stats().totals.rejoined > before:
            break
        time.sleep(0.02)
    assert client.stats().totals.rejoined > before
    assert tokens == list(client.generate(PROMPT, replace(LONG, max_tokens=len(tokens)), mode="ar").token_ids)
