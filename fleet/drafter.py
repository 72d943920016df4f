"""Drafters that Ray puts where it suits them: an actor that runs a draft worker, and what keeps an engine in one.

Drafts don't pass through it: the worker joins the engine's server by ZeroMQ, with a key that it was given room for.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.fleet.doors import Doors
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings, flags
from outrider.protocol.keyring import DRAFTER

BUNDLE = 1
"""Its place in the engine's placement group, behind the engine's own."""
AGAIN_SECONDS = 1.0
OWN = (
    "model", "draft_model", "draft_backend", "draft_prefill", "fan_out", "replay", "simulate", "threads", "cpu_kernels",
    "log_level", "log_format",
)  # fmt: skip
"""What a drafter is told of an engine's settings."""

log = logging.getLogger(__name__)


class Drafter:
    """A draft worker on this host, which ends with this actor."""

    def __init__(self) -> None:
        self._doors = Doors()

    def key(self) -> str:
        """The public key that it comes with."""
        return self._doors.key

    def draft(self, settings: ServeSettings, endpoint: str, server_key: str) -> int:
        """Drafts for the server at `endpoint`, whose key this is; returns the worker's exit code when it has ended."""
        theirs, lifeline = os.pipe()
        join = ["worker", "draft", "--connect", endpoint, "--server-key", server_key, "--parent-fd", str(theirs)]
        join += ["--keys", str(self._doors.folder), *flags(settings)]
        process = subprocess.Popen(
            python("-m", "outrider", *join), stdin=subprocess.DEVNULL, env=child_environment(), pass_fds=(theirs,)
        )
        os.close(theirs)
        try:
            return process.wait()
        finally:
            os.close(lifeline)


class Drafting(threading.Thread):
    """Sees to it that an engine has a drafter: another one, when its own is gone, as soon as a host has room."""

    def __init__(self, settings: ServeSettings, endpoint: str, doors: Doors) -> None:
        super().__init__(daemon=True, name="drafting")
        self._settings = ServeSettings(**{name: getattr(settings, name) for name in OWN})
        self._endpoint, self._doors = endpoint, doors

    def run(self) -> None:
        while True:
            drafter: Any = _placed().remote()
            key = ""
            try:
                key = ray.get(drafter.key.remote())
                self._doors.open(DRAFTER, key)
                code = ray.get(drafter.draft.remote(self._settings, self._endpoint, self._doors.key))
                log.warning("the drafter ended with code %s; another is placed", code)
            except RayError as error:
                log.warning("the drafter is lost (%s); another is placed", type(error).__name__)
            if key:
                self._doors.shut(key)
            ray.kill(drafter)
            time.sleep(AGAIN_SECONDS)


def _placed() -> Any:
    """Where the engine's placement group has it."""
    group = get_current_placement_group()
    there = PlacementGroupSchedulingStrategy(group, BUNDLE)
    return ray.remote(Drafter).options(num_cpus=0, scheduling_strategy=there)
