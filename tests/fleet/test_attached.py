"""Attached engines, one of them with two ranks: if one is lost, the ingress continues its texts on another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq

from outrider import LocalCluster
from outrider.fleet.plan import FleetPlan, IngressPlan
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.pairing.model_files import TINY_DRAFT
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.endpoints import BoundSocket
from outrider.protocol.errors import EndpointError, KeyFault
from outrider.protocol.keys import CLIENT, SERVER, AllowedKey, Keyring, make_pair
from tests.fleet.running_fleet import KEY, PROMPT, TIMEOUT_S, Fleet, kill, running, server_of, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(400)]
SHARDS = (1, 2)


@pytest.fixture(scope="module")
def foreign() -> Iterator[LocalCluster]:
    """A server with other weights."""
    with LocalCluster(endpoint="tcp://127.0.0.1:0", model=str(TINY_DRAFT), draft_backend="none") as server:
        yield server


@pytest.fixture(scope="module")
def fleet(hosts: Any, foreign: LocalCluster) -> Iterator[Fleet]:
    with ExitStack() as stack:
        servers = [LocalCluster(endpoint="tcp://127.0.0.1:0", shards=ranks, pin_cores=False) for ranks in SHARDS]
        for server in servers:
            stack.callback(server.close)
        ingress = IngressPlan(port=0, api_keys=(KEY,))
        plan = FleetPlan(
            ServeSettings(), attached=tuple(server.endpoint for server in (*servers, foreign)), ingress=ingress
        )
        yield stack.enter_context(running(plan, "attached", len(servers)))


def test_engine_with_other_weights_is_left_out_and_named_in_the_status(fleet: Fleet, foreign: LocalCluster) -> None:
    from ray import serve

    def status_message() -> str:
        return serve.status().applications[fleet.name].deployments[fleet.kind].message

    wait_until(
        lambda: f"{foreign.endpoint} has other weights, or another number format, than the one at" in status_message(),
        status_message(),
    )
    assert foreign.endpoint not in [place.endpoint for place in fleet.addresses()]
    foreign.close()


def test_malformed_endpoint_is_an_error_and_not_waited_for() -> None:
    from outrider.fleet.engine import wait_until_ready

    with pytest.raises(EndpointError, match="is not an endpoint"):
        wait_until_ready("nonsense", None)


class HandleOfOne:
    """A handle of Ray Serve for a deployment with a single engine, and its lease."""

    def __init__(self, place: Any) -> None:
        self.lease, self._places = self, iter([place])

    def options(self, **_: object) -> HandleOfOne:
        return self

    def remote(self, _: object) -> HandleOfOne:
        return self

    def cancel(self) -> None: ...

    def __aiter__(self) -> HandleOfOne:
        return self

    async def __anext__(self) -> Any:
        for place in self._places:
            return place
        await asyncio.Event().wait()


def test_engine_that_refuses_the_ingress_is_replaced_by_another(hosts: Any, tmp_path: Path) -> None:
    """As after its key was revoked. Its actor ends, and until then its texts continue on other engines."""
    from outrider.fleet.engine import EngineActor, EngineAddress
    from outrider.fleet.ingress import EngineLeases

    pair, ring, context = make_pair(), Keyring(tmp_path / "keys"), zmq.Context[Any]()
    ring.make()
    with closing(BoundSocket(context.socket(zmq.ROUTER), "tcp://127.0.0.1:0", pair, CLIENT)) as bound:
        ring.allow(AllowedKey(SERVER, pair.public, bound.endpoint.removeprefix("tcp://")))
        place = EngineAddress(bound.endpoint)
        leases = EngineLeases(IngressPlan(), [HandleOfOne(place)], [1], ring.folder)

        async def ask(client: AsyncClient) -> None:
            await client.stats()

        with pytest.raises(EndpointError, match="the engine refuses this ingress: "):
            asyncio.run(leases.complete("", ask))
        with pytest.raises(KeyFault):
            asyncio.run(EngineActor(place, None, ring.folder).check_health())
    context.destroy(linger=0)


def test_engine_whose_actor_hangs_does_not_hide_the_others(fleet: Fleet) -> None:
    """As if its host were lost: a broadcast of Ray Serve then returns no answer of any engine."""
    title = f"ray::ServeReplica:{fleet.name}:{fleet.kind}"
    actor = next(one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[0] == title)
    assert httpx.get(f"{fleet.url}/ready", timeout=TIMEOUT_S).status_code == 200
    actor.suspend()
    try:
        assert httpx.get(f"{fleet.url}/ready", timeout=TIMEOUT_S).status_code == 200
    finally:
        actor.resume()


def test_text_continues_on_another_engine_and_503_follows_without_any(fleet: Fleet, expected_text: str) -> None:
    assert fleet.stream(lambda: kill(server_of(fleet.busy_engine()[1]))) == expected_text
    ((_, last),) = wait_until(fleet.stats, "no engine answers")
    kill(server_of(last))
    asked, headers = {"prompt": PROMPT}, {"x-api-key": KEY}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=asked, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "no engine of the fleet answers" in answer.json()["error"]["message"]
    assert httpx.get(f"{fleet.url}/ready", timeout=TIMEOUT_S).status_code == 503
