"""A cluster with a draft worker, heads and n-grams: each drafter can be selected by name, and is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from outrider import Client, LocalCluster, Origin
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tests.suspend import pid_of, throttled
from tests.target_worker.heads import markov_llama, write_feature_head

WAYS = {
    ("sd", "draft"): Origin.DRAFTED,
    ("ssd", ""): Origin.PREPARED,
    ("sd", "eagle3"): Origin.HEAD,
    ("sd", "eagle3-3"): Origin.HEAD,
    ("sd", "ngram"): Origin.COPIED,
    ("ssd", "draft+eagle3"): Origin.PREPARED,
    ("auto", ""): None,
}
PROMPT = [40, 41, 42] * 4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("several")
    target = markov_llama(folder / "target")
    head = write_feature_head(folder / "head", target)
    broken = write_feature_head(folder / "broken", target)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    heads = [head, folder / "none", broken, head]
    settings = {"model": folder / "target", "draft_model": folder / "target"}
    with LocalCluster(**settings, head=heads, memory=False, trees=True) as cluster:
        yield cluster.client()


def test_every_drafter_keeps_the_text_and_is_reported_by_name(client: Client) -> None:
    params = SamplingParams(max_tokens=40, temp=0.8, seed=3, ignore_eos=True)
    alone = client.generate(PROMPT, params, mode="ar")
    for (mode, drafter), origin in WAYS.items():
        expected = {origin} - {None, Origin.COPIED}
        found = client.generate(PROMPT, params, mode=mode, drafter=drafter, origins=True)
        assert found.token_ids == alone.token_ids
        while not expected <= set(found.origins or ()):  # on a busy machine the drafter may be late
            with throttled(pid_of(client, "target")):
                found = client.generate(PROMPT, params, mode=mode, drafter=drafter, origins=True)
            assert found.token_ids == alone.token_ids
        if drafter.startswith("eagle3"):
            of_head = sum(origin in (Origin.HEAD, Origin.GUESSED) for origin in found.origins or ())
            accepted = found.timings.draft_n_accepted_by
            assert set(accepted) == {drafter} and accepted[drafter] == of_head


def test_unusable_heads_are_noted_once_and_others_work(client: Client) -> None:
    """A path that does not exist, and a head that does not fit this target."""
    found = client.generate(PROMPT, SamplingParams(max_tokens=4))
    absent, broken = sorted(note for note in found.notes if "is not used" in note)[::-1]
    assert absent.startswith("head ") and "no such path" in absent
    assert broken.startswith("drafter eagle3-2 is not used: ")
    other = client.generate(PROMPT, SamplingParams(max_tokens=4), mode="sd", drafter="eagle3-2")
    assert other.token_ids == found.token_ids and broken in other.notes


def test_unknown_drafter_error_lists_the_available_ones(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="expected one of draft, eagle3, eagle3-2, eagle3-3, ngram"):
        client.generate(PROMPT, drafter="mtp")
    with pytest.raises(InvalidRequest, match="mode ssd is for draft workers"):
        client.generate(PROMPT, mode="ssd", drafter="eagle3")
    with pytest.raises(InvalidRequest, match="expected mode ssd or auto"):
        client.generate(PROMPT, mode="sd", drafter="draft+eagle3")
