"""Placed engines with drafters on other hosts: whichever process is killed, the text is the target's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from outrider.fleet.host import Resources
from outrider.fleet.plan import DrafterPlan, FleetPlan, IngressPlan, Placed
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.keys import make_pair
from tests.fleet.running_fleet import (
    BODY,
    KEY,
    TIMEOUT_S,
    Fleet,
    actor_of,
    drafters_actor_of,
    kill,
    running,
    server_of,
    target_of,
    wait_until,
)

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(400)]
DRAFTER = DrafterPlan(on="other-host", needs=Resources(ane=1))


@pytest.fixture(scope="module")
def fleet(hosts: Any) -> Iterator[Fleet]:
    ingress = IngressPlan(port=0, api_keys=(KEY,))
    placed = Placed(replicas=2, needs=Resources(metal=1), drafter=DRAFTER)
    engine = ServeSettings(memory=False, draft_prefill="coreml")  # of the drafters, which are not on the engines' hosts
    with running(FleetPlan(engine, placed, ingress=ingress), "placed", 2) as found:
        yield found


@pytest.fixture(autouse=True)
def wait_until_complete(fleet: Fleet) -> None:
    """Waits until the processes that the previous test killed have been replaced."""
    wait_until(lambda: fleet.is_complete(2), "not all engines are ready")


def test_placed_drafters_join_from_other_hosts_and_their_chains_are_accepted(
    fleet: Fleet, hosts: Any, expected_text: str
) -> None:
    def drafting() -> list[str]:
        workers = [worker for _, one in fleet.stats() for worker in one.workers]
        return [worker.name for worker in workers if worker.role == "draft" and worker.state == "ready"]

    wait_until(lambda: len(drafting()) == 2, "the drafters did not join")
    where = {place.host for place in fleet.addresses()}
    assert len(where) == 2 and hosts.head_node.node_id not in where
    assert fleet.stream() == expected_text
    _, busiest = max(fleet.stats(), key=lambda one: one[1].finished)
    assert sum(count for name, count in busiest.totals.draft_n_accepted_by.items() if name in drafting()) > 0


def test_ingress_serves_the_http_api_and_requires_keys(fleet: Fleet, expected_text: str) -> None:
    refused = httpx.post(f"{fleet.url}/v1/completions", json=BODY, timeout=TIMEOUT_S)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    headers = {"x-api-key": KEY}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=BODY, headers=headers, timeout=TIMEOUT_S)
    assert answer.json()["choices"][0]["text"] == expected_text
    assert httpx.get(f"{fleet.url}/ready", timeout=TIMEOUT_S).json()["status"] == "ready"
    assert "outrider:up 1.0" in httpx.get(f"{fleet.url}/metrics", headers=headers, timeout=TIMEOUT_S).text


def test_status_shows_the_engines_that_answer(fleet: Fleet) -> None:
    from outrider.fleet.deployment import collect

    one = server_of(fleet.stats()[0][1])
    assert len(collect(fleet.kind, "report", fleet.name)) == 2
    one.suspend()
    try:
        assert len(collect(fleet.kind, "report", fleet.name)) == 1
    finally:
        one.resume()


def test_fleet_is_ready_while_one_of_its_engines_is_replaced(fleet: Fleet) -> None:
    kill(actor_of(fleet.stats()[0][1]))
    answers = [httpx.get(f"{fleet.url}/ready", timeout=TIMEOUT_S).status_code for _ in range(20)]
    assert set(answers) == {200}


@pytest.mark.parametrize("victim", [actor_of, server_of, target_of, drafters_actor_of])
def test_text_is_unchanged_when_one_of_its_processes_is_killed(
    fleet: Fleet, expected_text: str, victim: Callable[..., psutil.Process]
) -> None:
    assert fleet.stream(lambda: kill(victim(fleet.busy_engine()[1]))) == expected_text


def test_drafter_that_was_suspended_drafts_again(fleet: Fleet) -> None:
    """As on a host that slept: its engine has given it up, and their connection is closed."""
    place = fleet.addresses()[0]

    def drafters(state: str) -> list[int]:
        workers = [worker for where, one in fleet.stats() if where == place for worker in one.workers]
        return [worker.pid for worker in workers if worker.role == "draft" and worker.state == state]

    (pid,) = wait_until(lambda: drafters("ready"), "the drafter did not join")
    psutil.Process(pid).suspend()
    try:
        wait_until(lambda: drafters("lost"), "the drafter is not given up")
    finally:
        psutil.Process(pid).resume()
    assert wait_until(lambda: drafters("ready"), "the drafter does not draft again") == [pid]


def test_text_is_unchanged_when_its_host_is_lost(fleet: Fleet, hosts: Any, expected_text: str) -> None:
    def lose_the_host() -> None:
        host = fleet.busy_engine()[0].host
        (lost,) = [node for node in hosts.list_all_nodes() if node.node_id == host]
        hosts.remove_node(lost, allow_graceful=False)

    try:
        assert fleet.stream(lose_the_host) == expected_text
    finally:
        hosts.add_node(num_cpus=1, resources={"metal": 1})


def test_a_session_stays_with_its_engine(fleet: Fleet) -> None:
    before = {place: one.finished for place, one in fleet.stats()}
    for _ in range(4):
        fleet.stream(session="one and the same", max_tokens=8)
    assert sorted(one.finished - before[place] for place, one in fleet.stats()) == [0, 4]


def test_a_request_whose_client_leaves_is_cancelled(fleet: Fleet) -> None:
    asked = {**BODY, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=asked, headers={"x-api-key": KEY}) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data: {") and json.loads(line[6:]))
    wait_until(lambda: not any(one.active for _, one in fleet.stats()), "the text went on")


def test_lease_is_held_as_long_as_its_ingress_lives(fleet: Fleet) -> None:
    import ray
    from ray import serve

    from outrider.fleet.deployment import HEALTH_PERIOD_SECONDS
    from outrider.fleet.engine import NAMESPACE, IngressKey

    named = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in named if one["namespace"] == NAMESPACE]
    (ingress,) = [name for name in names if f"{fleet.name}#ingress#" in name]
    lease = (
        serve.get_deployment_handle("placed", fleet.name)
        .options(stream=True)
        .lease.remote(IngressKey(make_pair().public, ingress))
    )
    assert next(lease) in fleet.addresses()
    actors = [ray.get_actor(name, NAMESPACE) for name in names if "#placed#" in name]

    def leases() -> int:
        return sum(ray.get([actor.get_num_ongoing_requests.remote() for actor in actors]))

    time.sleep(3 * HEALTH_PERIOD_SECONDS)  # by then engines have checked whether it is alive
    assert leases() == 1
    processes = psutil.process_iter(["cmdline"])
    (killed,) = [one for one in processes if "ServeReplica:placed:ingress" in "".join(one.info["cmdline"] or ())[:80]]
    kill(killed)
    wait_until(lambda: leases() == 0, "a lease is left")
