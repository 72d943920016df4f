"""A drafter on another host: the text is the same with any link, and the drafter rejoins after the link was cut.

The hosts are network namespaces. The drafter is started by `outrider worker draft --connect`, as by a user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider import Client, SamplingParams
from tests.harness.two_hosts import namespace
from tests.harness.two_hosts.drafter import NAME, remote_cluster, wait_for_state
from tests.harness.two_hosts.hosts import TwoHosts
from tests.suspend import suspended_text
from tests.tiny import Pair

UNSUPPORTED = namespace.unsupported_reason()
pytestmark = pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))

PROMPT = "def fibonacci(n):"
SAMPLED = SamplingParams(max_tokens=60, temp=0.8, seed=5, ignore_eos=True)
LONG = replace(SAMPLED, max_tokens=200)
TRIES = 20


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


@pytest.fixture(scope="module")
def client(hosts: TwoHosts, served: Pair) -> Iterator[Client]:
    """The client of a cluster whose only drafter is on the other host. Both sides have keys."""
    with remote_cluster(hosts, ("--draft-model", str(served.draft)), model=str(served.target), max_active=2) as known:
        yield known


@pytest.fixture(scope="module")
def whole(client: Client) -> tuple[int, ...]:
    return client.generate(PROMPT, SAMPLED, mode="ar").token_ids


@pytest.mark.parametrize(("rtt_ms", "loss"), [(0.2, 0.0), (2, 0.01), (20, 0.01)])
def test_a_text_is_the_same_over_any_link(
    hosts: TwoHosts, client: Client, whole: tuple[int, ...], rtt_ms: float, loss: float
) -> None:
    hosts.shape(rtt_ms, loss)
    assert client.generate(PROMPT, SAMPLED, mode="ssd").token_ids == whole


def test_drafter_rejoins_a_text_after_its_link_is_cut_and_healed(hosts: TwoHosts, client: Client) -> None:
    hosts.shape(2)
    for _ in range(TRIES):  # a target that is suspended for too long is replaced
        with suspended_text(client, lambda: client.stream(PROMPT, LONG, mode="ssd")) as (stream, chunks):
            hosts.cut()
            wait_for_state(client, NAME, "frozen")
            hosts.heal()
            wait_for_state(client, NAME, "ready")
        for _ in chunks:
            pass
        if stream.result.timings.rejoined:
            break
    assert stream.result.timings.rejoined, "the drafter did not come back into the text"
    assert stream.result.token_ids == client.generate(PROMPT, LONG, mode="ar").token_ids
