"""For residual sampling every chain has the q it was drawn from, and both equal a fresh drafter's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES, Calibration
from outrider.drafters.growth import BranchTask, Continuation
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.work_ahead import WorkAhead
from outrider.protocol.messages import Branches, Commit, Drafted, Message, Open
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ
from tests.drafting import advance, draft_chain
from tests.slots import open_draft_tree
from tests.system.links import FakeLink, run_worker
from tests.system.markov import markov
from tools.simulation.replay import ReplayDrafter, Script

V = 12
SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "1"))
TABLE = np.random.default_rng(4).normal(size=(V, V)).astype(np.float32)
PROMPT = (1, 5, 2, 7)
SAMPLING = SamplingParams(temp=1.0, seed=8, rule="residual", saguaro=0.5, q_width=6)


@pytest.fixture(scope="module")
def drafter() -> MlxDrafter:
    return MlxDrafter(markov(TABLE))


@pytest.fixture
def begin(drafter: MlxDrafter) -> Callable[[tuple[int, ...]], WorkAhead]:
    return lambda tokens: start_work(drafter, SAMPLING, tokens)


def start_work(drafter: MlxDrafter, sampling: SamplingParams, tokens: tuple[int, ...] = PROMPT) -> WorkAhead:
    return WorkAhead(
        open_draft_tree(drafter, tokens, sampling, cached=2), (), FAN_OUT_POLICIES["best-first"], Calibration()
    )


def are_equal(q: SparseQ | None, other: SparseQ | None) -> bool:
    return q is not None and other is not None and bool((q.ids == other.ids).all() and (q.probs == other.probs).all())


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("forwards", [1, 2, 3, 10])
def test_pushed_branches_equal_the_draws_of_a_fresh_drafter(
    begin: Callable[[tuple[int, ...]], WorkAhead], forwards: int, seed: int
) -> None:
    """Whatever is verified: the branch, a prefix of it, another drafter's chain, or a chain on request."""
    rng = random.Random(f"{forwards} {seed}")
    work, committed = begin(PROMPT), list(PROMPT)
    work.commit((), BranchTask((), 3, 8))
    checked = 0
    for _ in range(12):
        entries: dict[tuple[int, int], tuple[int, ...]] = {}
        for _ in range(forwards):
            if not work.has_work:
                continue
            ready = advance(work)
            if ready is None or not ready.entries:
                continue
            assert ready.q is not None and ready.q.fits([token for e in ready.entries for token in e.chain])
            end = 0
            for entry in ready.entries:
                start, end = end, end + len(entry.chain)
                place = (*committed, *entry.committed)
                fresh = draft_chain(begin(place), len(entry.chain))
                assert fresh.chain == entry.chain and are_equal(fresh.q, ready.q.part(start, end))
                entries[entry.committed] = entry.chain
                checked += 1
        known = sorted(entries, key=lambda outcome: (len(outcome), outcome[-1]))
        new = rng.choice(known) if known and rng.random() < 0.7 else (rng.randrange(V),)
        committed += new
        own, way = entries.get(new, ()), rng.random()
        if way < 0.2:
            work.commit(new, BranchTask(None, 3))
            new, own = (), draft_chain(work, 3).chain
            assert own == draft_chain(begin(tuple(committed)), 3).chain
        chain = [*own[: rng.randint(0, 3)], *(rng.randrange(V) for _ in range(rng.randint(0, 2)))] if way < 0.6 else own
        work.commit(new, BranchTask(chain, 3, 8))
    assert checked > 20


def test_branches_do_not_depend_on_the_noise_of_another_drafter() -> None:
    """Two drafters draft; the first one's chain is verified, and the second has a branch for its own first token.

    The chain under verification affects which outcomes get branches, and so does the noise of its tokens. If a branch
    were drawn with the same noise, its use would depend on its content.
    """
    tables = np.random.default_rng(6).normal(size=(2, V, V)).astype(np.float32) / 2
    first, second = (MlxDrafter(markov(table)) for table in tables)
    alike = expected = variance = 0.0
    for seed in range(200):
        sampling = replace(SAMPLING, seed=seed, saguaro=1.0)
        chain = draft_chain(start_work(first, sampling), 2).chain
        work = start_work(second, sampling)
        own = draft_chain(work, 2).chain[0]
        work.commit((), BranchTask(chain, 1, 3 * V))
        ready = advance(work)
        assert ready is not None and ready.q is not None
        for row, entry in enumerate(ready.entries):
            if entry.committed == (own,):
                share = float(ready.q.probs[row][ready.q.ids[row] == chain[1]].sum())
                alike += entry.chain[0] == chain[1]
                expected += share
                variance += share * (1 - share)
    assert expected > 10 and abs(alike - expected) < 4 * variance**0.5, (alike, expected)


def test_continuation_without_room_is_empty(begin: Callable[[tuple[int, ...]], WorkAhead]) -> None:
    assert draft_chain(begin(PROMPT), 0) == Continuation()


# --- the worker -----------------------------------------------------------------------------------------------------


def messages_of(drafter: Any, sampling: SamplingParams, kind: type[Message]) -> list[Any]:
    """A worker's messages of this class after a COMMIT that requests branches and one that requests a chain."""
    tokens = np.array(PROMPT, np.int32)
    link = FakeLink("draft-0")
    worker = DraftWorker(link, drafter, FAN_OUT_POLICIES["uniform"])
    opening, task = Open("r", 0, 0, tokens, sampling, fan_out=2), Commit("r", 0, 0, len(PROMPT), (), (), 2, 6)
    found = run_worker(worker, link, [opening, task], turns=9)
    found += run_worker(worker, link, [Commit("r", 0, 1, len(PROMPT) + 1, (3,), None, 3, 6)], turns=2)
    return [message for message in found if isinstance(message, kind)]


@pytest.mark.parametrize("kind", [Branches, Drafted])
def test_drawing_drafter_sends_q_only_for_residual_sampling(drafter: MlxDrafter, kind: type[Message]) -> None:
    coupled = replace(SAMPLING, rule="coupled", saguaro=1.0)
    assert all(message.q is not None for message in messages_of(drafter, SAMPLING, kind))
    for sampling in (coupled, replace(SAMPLING, temp=0.0)):
        messages = messages_of(drafter, sampling, kind)
        assert messages and all(message.q is None for message in messages)


@pytest.mark.parametrize("kind", [Branches, Drafted])
def test_drafter_that_cannot_draw_sends_no_q(kind: type[Message]) -> None:
    replay = ReplayDrafter(Script(((*PROMPT, *range(64)),), (0.7,), (0.5,), 64))
    messages = messages_of(replay, SAMPLING, kind)
    assert messages and all(message.q is None for message in messages)


def test_saguaro_factor_lowers_an_even_share_of_the_branches(drafter: MlxDrafter) -> None:
    """OPEN has the number of branches."""
    found = messages_of(drafter, replace(SAMPLING, q_width=V), Drafted)[0]
    row = TABLE[3].astype(np.float64)
    best = np.argsort(-row)[:2]
    weight = np.exp(row) * np.where(np.isin(np.arange(V), best), SAMPLING.saguaro, 1.0)
    assert np.allclose(found.q.probs[0], (weight / weight.sum())[found.q.ids[0]], atol=1e-6)
