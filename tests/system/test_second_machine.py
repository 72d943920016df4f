"""A drafter and clients with keys, by TCP and in separate processes, as from another machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import KeyFault
from outrider.protocol.keys import CLIENT, DRAFTER, PREFILL, AllowedKey, Keyring
from outrider.protocol.sampling import SamplingParams
from tests.tiny import Pair

LIMIT, TRIES = 200.0, 20
TCP = "tcp://127.0.0.1:0"
SAMPLING = SamplingParams(max_tokens=24, temp=0.8, seed=7)


@pytest.fixture(scope="module")
def keyrings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keyring]:
    folder = tmp_path_factory.mktemp("rings")
    made = {name: Keyring(folder / name) for name in ("server", "mini", "midi", "studio", "laptop", "stranger")}
    for ring in made.values():
        ring.make()
    for name in ("mini", "midi"):
        made["server"].allow(AllowedKey(DRAFTER, made[name].own().public, name))
    made["server"].allow(AllowedKey(PREFILL, made["studio"].own().public, "studio"))
    made["server"].allow(AllowedKey(CLIENT, made["laptop"].own().public, "laptop"))
    return made


@pytest.fixture(scope="module")
def cluster(keyrings: dict[str, Keyring], served: Pair) -> Iterator[LocalCluster]:
    endpoints = {"endpoint": TCP, "workers_endpoint": TCP, "keyed": True, "keys": keyrings["server"].folder}
    with LocalCluster(model=served.target, draft_model=served.draft, prefill_from=64, **endpoints) as running:
        yield running


def join(cluster: LocalCluster, role: str, name: str, *flags: str) -> subprocess.Popen[str]:
    command = python("-m", "outrider", "worker", role, "--connect", cluster.joining_endpoint, "--name", name)
    return subprocess.Popen([*command, *flags], env=child_environment(), stderr=subprocess.PIPE, text=True)


def test_only_allowed_keys_may_connect_and_draft(
    cluster: LocalCluster, keyrings: dict[str, Keyring], served: Pair
) -> None:
    key = keyrings["server"].own().public
    client = Client(cluster.endpoint, server_key=key, keys=keyrings["laptop"].folder)
    for name in ("stranger", "mini"):
        with pytest.raises(KeyFault, match="refuses this side's key"):
            Client(cluster.endpoint, server_key=key, keys=keyrings[name].folder).stats()
    text = client.generate("def f(", SAMPLING).token_ids
    assert text == cluster.client().generate("def f(", SAMPLING).token_ids

    def wait_until_state(state: str) -> None:
        deadline = time.monotonic() + LIMIT
        while [one.state for one in client.stats().workers if one.name == "mini"] != [state]:
            assert time.monotonic() < deadline, client.stats().workers
            time.sleep(0.05)

    keys = ("--server-key", key, "--keys", str(keyrings["mini"].folder))
    with join(cluster, "draft", "mini", "--draft-model", str(served.draft), *keys) as mini:
        try:
            wait_until_state("ready")
            assert client.generate("def f(", SAMPLING, mode="ssd").token_ids == text
            keyrings["server"].revoke("mini")
            wait_until_state("lost")
            assert mini.wait(LIMIT) == KeyFault.exit_code and mini.stderr is not None
            assert "its key is not allowed" in mini.stderr.read()
        finally:
            mini.kill()
    assert client.generate("def f(", SAMPLING, mode="ssd").token_ids == text


def test_prefill_worker_needs_a_key_for_its_role(
    cluster: LocalCluster, keyrings: dict[str, Keyring], served: Pair
) -> None:
    """A drafter's key is not enough, because the keys and values of a prefill worker can't be verified."""
    client, prompt = cluster.client(), "import os\n" * 60
    alone = client.generate(prompt, SAMPLING)
    key = keyrings["server"].own().public

    def joined(name: str) -> subprocess.Popen[str]:
        keys = ("--server-key", key, "--keys", str(keyrings[name].folder))
        return join(cluster, "prefill", name, "--model", str(served.target), *keys)

    with joined("midi") as refused:
        err = refused.communicate(timeout=LIMIT)[1]
    assert refused.returncode != 0 and "its key is not allowed" in err
    with joined("studio") as studio:
        try:
            for number in range(TRIES):  # the target reads the prompt itself if the prefill worker is too slow
                deadline = time.monotonic() + LIMIT
                while "ready" not in [one.state for one in client.stats().workers if one.name == "studio"]:
                    assert time.monotonic() < deadline, client.stats().workers
                    time.sleep(0.05)
                another = f"{number} import re\n" * 60
                prefilled = client.generate(another, SAMPLING)
                if prefilled.timings.prefill_n:
                    break
            assert prefilled.timings.prefill_n == prefilled.timings.prompt_n - 1 > 100
        finally:
            studio.kill()
    without_it = client.generate(prompt.replace("os", "sys"), SAMPLING)
    assert without_it.timings.prefill_n == 0
    with LocalCluster(model=served.target, draft_backend="none", prefill_workers=1, prefill_from=64) as own:
        assert own.client().generate(another, SAMPLING).token_ids == prefilled.token_ids
        assert own.client().generate(prompt, SAMPLING).token_ids == alone.token_ids
