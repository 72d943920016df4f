"""Engines are added and removed with the load, and a target of several ranks recovers; texts do not change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from outrider.fleet.host import Resources
from outrider.fleet.plan import FleetPlan, IngressPlan, Placed, Scale
from outrider.orchestrator.settings import ServeSettings
from tests.fleet.running_fleet import KEY, Fleet, kill, running, target_of, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(400)]
INGRESS = IngressPlan(port=0, api_keys=(KEY,))
METAL = Resources(metal=1)


def test_engines_scale_with_the_load_and_texts_stay_the_same(hosts: Any, expected_text: str) -> None:
    scale = Scale(min=1, max=2, requests_per_engine=1, upscale_delay_s=0, downscale_delay_s=0)
    plan = FleetPlan(ServeSettings(memory=False), Placed(needs=METAL), ingress=INGRESS, scale=scale)
    with running(plan, "scaled", 1) as fleet:
        assert set(read_texts(fleet, 4, lambda: fleet.is_complete(2))) == {expected_text}
        assert set(read_texts(fleet, 1, lambda: len(fleet.addresses()) == 1)) == {expected_text}


def read_texts(fleet: Fleet, clients: int, is_enough: Callable[[], bool]) -> list[str]:
    """Runs so many clients, which repeat their request until `is_enough` returns true, and returns all their texts."""
    finished: list[bool] = []

    def client() -> list[str]:
        texts = []
        while not finished:
            texts.append(fleet.stream())
        return texts

    with ThreadPoolExecutor(clients) as pool:
        pending = [pool.submit(client) for _ in range(clients)]
        try:
            wait_until(is_enough, "the load changed nothing")
        finally:
            finished.append(True)
        return [text for one in pending for text in one.result()]


def test_text_continues_on_the_same_engine_after_a_rank_is_killed(hosts: Any, expected_text: str) -> None:
    plan = FleetPlan(ServeSettings(memory=False, shards=2), Placed(needs=METAL), ingress=INGRESS)
    with running(plan, "ranks", 1) as fleet:
        before = fleet.addresses()
        killed: list[psutil.Process] = []

        def kill_rank_1() -> None:
            (rank_1,) = target_of(fleet.busy_engine()[1]).children()
            kill(rank_1)
            killed.append(rank_1)

        assert fleet.stream(kill_rank_1) == expected_text and killed
        assert fleet.addresses() == before, "it is the same engine"
