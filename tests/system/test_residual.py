"""Residual sampling keeps the target's distribution on every path of a cluster, and for every kind of chain.

The target is a Markov chain (tests/system/markov.py), so that the distribution of the text is known.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from outrider.drafters.drafter import TokenTree
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.engine.verify import BatchForward, VerifyInput, begin_forward
from outrider.protocol.messages import Branches, Drafted, DraftTokens, Message, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ, one_hot
from outrider.target_worker import model_runner
from tests.slots import open_tree
from tests.system.cluster import AMPLE, MIXED, SLOW, Cluster, Run, Schedule
from tests.system.links import intercept
from tests.system.markov import markov, p_values

Make = Callable[..., Cluster]
V = 4
TABLE = np.random.default_rng(2).normal(size=(V, V)).astype(np.float32)
OTHER = -TABLE
"""The draft prefers tokens that the target avoids, so that a wrong q changes the distribution visibly in few tokens."""
LENGTH = 200
SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "1"))
# Seeds are fixed, so a correct program always passes. With a wrong one, p is smaller by many orders of magnitude.
ALPHA, DETECTED = 1e-3, 1e-7
SAMPLING = SamplingParams(max_tokens=LENGTH, temp=1.0, rule="residual", q_width=3)
PROMPT = [0, 1, 2, 3, 1, 0, 2]


class GreedyDrafter:
    """A drafter that does not sample, but proposes the likeliest tokens."""

    def __init__(self, inner: MlxDrafter) -> None:
        self._inner = inner

    def open(self, tokens: Sequence[int], sampling: SamplingParams, *_: Any) -> TokenTree:
        return open_tree(self._inner.model, tokens, sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class Path:
    """A cluster in which at least `share` of the chains come from `source`, by `kind`."""

    mode: str
    source: str
    kind: str
    settings: dict[str, Any]
    drafter: str = "draws"
    sampling: SamplingParams = SAMPLING
    share: float = 0.7


ONE_STEP = Schedule(turns=(2,))
HITS = {"full_depth": True, "branches": 12, "ngrams": False, "depth": 2}
PATHS = {
    "hit": Path("ssd", "hit", "drawn", HITS),
    "shallow hit": Path("ssd", "hit", "drawn", {**HITS, "full_depth": False, "schedule": ONE_STEP}, share=0.3),
    "miss": Path("ssd", "drafted", "drawn", {"branches": 1, "schedule": SLOW, "ngrams": False}),
    "sd": Path("sd", "drafted", "drawn", {"ngrams": False}),
    "saguaro": Path("ssd", "hit", "drawn", {**HITS, "branches": 6}, sampling=replace(SAMPLING, saguaro=0.3), share=0.5),
    "n-gram": Path("ssd", "copied", "DraftTokens", {}, "none"),
    "certain": Path("ssd", "hit", "DraftTokens", HITS, "certain"),
    "ar": Path("ar", "target", "Autonomous", {}),
    "any": Path("ssd", "hit", "drawn", {"schedule": MIXED, "branches": 4}, share=0.2),
}


@pytest.fixture
def make(make_cluster: Make) -> Callable[[Path], Cluster]:
    clock = make_cluster(None)._clock
    drafter = MlxDrafter(markov(OTHER))
    drafters = {"draws": drafter, "certain": GreedyDrafter(drafter), "none": None}
    return lambda path: Cluster(markov(TABLE), drafters[path.drafter], clock, **path.settings)  # type: ignore[arg-type]


def runs(cluster: Cluster, path: Path, requests: int = SEEDS) -> list[Run]:
    return [cluster.run(PROMPT, replace(path.sampling, seed=7919 * i + 3), path.mode) for i in range(requests)]


def text_p_values(found: Sequence[Run]) -> tuple[float, float]:
    return p_values([[PROMPT[-1], *run.tokens] for run in found], TABLE)


@pytest.mark.parametrize("name", PATHS)
def test_texts_have_the_targets_distribution(make: Callable[[Path], Cluster], name: str) -> None:
    """OUTRIDER_SEEDS=200 or more runs the long form."""
    path = PATHS[name]
    found = runs(make(path), path)
    assert min(text_p_values(found)) > ALPHA
    sources = Counter((round_.source, round_.kind) for run in found for round_ in run.rounds)
    assert sources[path.source, path.kind] > path.share * sources.total(), sources


TOGETHER, SHARED_LENGTH = 5, 44  # in all about as many tokens as in the test above


@pytest.mark.parametrize("name", ["hit", "sd", "n-gram", "any"])
def test_texts_sharing_forwards_have_the_targets_distribution(
    make: Callable[[Path], Cluster], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """OUTRIDER_SEEDS=200 or more runs the long form."""
    shared: Counter[int] = Counter()

    def counting(inputs: Sequence[VerifyInput], *others: Any) -> BatchForward:
        shared[len(inputs)] += 1
        return begin_forward(inputs, *others)

    monkeypatch.setattr(model_runner, "begin_forward", counting)
    path = PATHS[name]
    cluster, texts = make(path), []
    for first in range(0, max(SEEDS, TOGETHER), TOGETHER):
        seeds = range(first, min(first + TOGETHER, max(SEEDS, TOGETHER)))
        samplings = [replace(path.sampling, max_tokens=SHARED_LENGTH, seed=104729 * seed + 7) for seed in seeds]
        texts += cluster.run_concurrently(PROMPT, samplings, path.mode)
    assert min(p_values([[PROMPT[-1], *text] for text in texts], TABLE)) > ALPHA
    assert all(len(text) == SHARED_LENGTH for text in texts)
    assert sum(count for inputs, count in shared.items() if inputs > 1) > 0.5 * shared.total(), shared


# --- errors that must be detected -----------------------------------------------------------------------------------


def unscaled(message: Verify, last: int) -> Verify:
    """Replaces q by one without Saguaro's factor."""
    if not isinstance(message.proposal, DraftTokens) or message.proposal.q is None:
        return message
    before, ids = [last, *message.chain[:-1]], message.proposal.q.ids
    weights = [np.exp(OTHER[token][row]) for token, row in zip(before, ids, strict=True)]
    q = SparseQ(ids, np.array([row / row.sum() for row in weights], np.float32))
    return structs.replace(message, proposal=DraftTokens(message.chain, q=q))


def taken_as_flat(message: Verify, last: int) -> Verify:
    ids = np.tile(np.arange(V, dtype=np.int32), (len(message.chain), 1))
    q = SparseQ(ids, np.full(ids.shape, 1 / V, np.float32))
    return structs.replace(message, proposal=DraftTokens(message.chain, q=q))


@pytest.mark.parametrize(
    ("name", "tamper", "requests"), [("saguaro", unscaled, 3), ("sd", taken_as_flat, 2), ("n-gram", taken_as_flat, 2)]
)
def test_chain_verified_with_a_wrong_q_is_detected(
    make: Callable[[Path], Cluster], name: str, tamper: Callable[[Verify, int], Verify], requests: int
) -> None:
    path = PATHS[name]
    cluster = make(path)
    send = cluster.send_target

    def tampered(message: Message) -> None:
        if isinstance(message, Verify) and message.chain:
            message = tamper(message, cluster.rounds._requests[message.request].sequence.tokens[-1])
        send(message)

    cluster.send_target = tampered  # type: ignore[method-assign]
    assert min(text_p_values(runs(cluster, path, requests))) < DETECTED


@pytest.mark.parametrize("kind", [Branches, Drafted])
def test_a_q_that_does_not_fit_its_chains_is_dropped_and_counted(
    make: Callable[[Path], Cluster], kind: type[Branches] | type[Drafted]
) -> None:
    cluster = make(PATHS["hit" if kind is Branches else "sd"])

    def spoilt(sender: str, message: Message, now_ns: int) -> None:
        if isinstance(message, kind) and message.q is not None and len(message.q) > 1:
            message = structs.replace(message, q=message.q.part(1, len(message.q)))
        handle(sender, message, now_ns)

    invalid: list[str] = []
    cluster.record_invalid = lambda name, kind: invalid.append(kind)  # type: ignore[method-assign]
    handle = intercept(cluster.rounds, spoilt)
    run = cluster.run(PROMPT, replace(SAMPLING, seed=1, max_tokens=40), "ssd" if kind is Branches else "sd")
    assert len(run.tokens) == 40 and cluster.rounds.stale > 10 and set(invalid) == {"q"}


# --- other guarantees -----------------------------------------------------------------------------------------------

SHAPED = SamplingParams(
    max_tokens=24, temp=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, seed=21, rule="residual",
    saguaro=0.6,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_full_depth_makes_a_text_reproducible(make_cluster: Make, mode: str) -> None:
    """Neither hits and misses, nor timing, nor what the fan-out learned from earlier requests change a token."""
    cluster = make_cluster("model", depth=3, branches=6, full_depth=True)
    first = cluster.run(PROMPT, SHAPED, mode)
    cluster.run(PROMPT, replace(SHAPED, seed=5), mode)
    again = cluster.run(PROMPT, SHAPED, mode)
    others = [
        make_cluster("model", depth=3, branches=6, full_depth=True, policy=policy, schedule=schedule, seed=seed).run(
            PROMPT, SHAPED, mode
        )
        for seed, (policy, schedule) in enumerate(
            [("uniform", AMPLE), ("geometric", SLOW), ("best-first", Schedule(turns=(0, 1, 2)))]
        )
    ]
    assert all(run.tokens == first.tokens for run in (again, *others))
    if mode == "ssd":
        assert min(first.sources["hit"], first.sources["drafted"]) > 2


def test_draft_equal_to_the_target_is_always_accepted(make_cluster: Make) -> None:
    sampling = SamplingParams(max_tokens=100, temp=1.0, seed=9, rule="residual", q_width=1024)
    times = make_cluster("self", depth=4, branches=8, ngrams=False, schedule=MIXED).run(PROMPT, sampling).timings
    assert times.draft_n_accepted == times.draft_n > 40


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_residual_rule_changes_nothing_at_temperature_zero(
    make_cluster: Make, small_pair: Callable[..., tuple[LoadedModel, LoadedModel]], plain: Callable[..., Any], mode: str
) -> None:
    sampling = SamplingParams(max_tokens=60, rule="residual")
    run = make_cluster("model", schedule=MIXED).run(PROMPT, sampling, mode)
    assert run.tokens == plain(small_pair("self")[0], PROMPT, replace(sampling, rule="coupled"))
    assert {round_.kind for round_ in run.rounds} <= {"DraftTokens", "Autonomous"}


def test_coupled_chains_carry_no_q(make_cluster: Make) -> None:
    cluster = make_cluster("model", schedule=MIXED)
    seen: list[SparseQ | None] = []

    def look(sender: str, message: Message, now_ns: int) -> None:
        if isinstance(message, Branches | Drafted):
            seen.append(message.q)
        handle(sender, message, now_ns)

    handle = intercept(cluster.rounds, look)
    cluster.run(PROMPT, SamplingParams(max_tokens=40, temp=1.0, seed=1))
    assert len(seen) > 10 and set(seen) == {None}


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_q_of_a_coupled_chain_is_ignored(make_cluster: Make, mode: str) -> None:
    """The target would fail a coupled chain with a q, and a drafter must not be able to fail a request."""
    sampling = SamplingParams(max_tokens=40, temp=1.0, seed=1)
    expected = make_cluster("model", schedule=MIXED).run(PROMPT, sampling, mode).tokens
    cluster = make_cluster("model", schedule=MIXED)

    def drawn(sender: str, message: Message, now_ns: int) -> None:
        if isinstance(message, Branches | Drafted):
            drafts = message.entries if isinstance(message, Branches) else (message,)
            message = structs.replace(message, q=one_hot([token for draft in drafts for token in draft.chain]))
        handle(sender, message, now_ns)

    handle = intercept(cluster.rounds, drawn)
    run = cluster.run(PROMPT, sampling, mode)
    assert run.tokens == expected and run.timings.draft_n > 20


def test_one_hot_q_fits_its_chain() -> None:
    q = one_hot([3, 1])
    assert q.ids.tolist() == [[3], [1]] and q.probs.tolist() == [[1.0], [1.0]] and q.fits([3, 1])
