"""A chain is verified by the request's sampling rule; one that does not fit the rule fails only that request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.protocol.messages import DraftTokens, Fault, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ, one_hot
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, run_worker
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
RESIDUAL = SamplingParams(temp=1.0, seed=3, rule="residual")
COUPLED = SamplingParams(temp=1.0, seed=3)
PROMPT = np.array([1, 4, 2], np.int32)


def answer(sampling: SamplingParams, verify: Verify) -> Any:
    """The target's answer to `verify`, whose base_len and request are filled in."""
    link = FakeLink("target-0")
    worker = TargetWorker(link, markov(TABLE))  # type: ignore[arg-type]
    run_worker(worker, link, [Open("r", 0, 0, PROMPT, sampling)])
    return run_worker(worker, link, [replace(verify, request="r", base_len=len(PROMPT) + 1)])[-1]


def verify(chain: tuple[int, ...], q: SparseQ | None = None, parents: tuple[int, ...] = ()) -> Verify:
    return Verify("", 0, 1, 0, DraftTokens(chain, parents, q))


def test_tokens_without_a_q_were_chosen_with_certainty() -> None:
    for token in range(6):
        certain = answer(RESIDUAL, verify((token,)))
        explicit = answer(RESIDUAL, verify((token,), one_hot([token])))
        assert isinstance(certain, Outcome) and (certain.accepted, certain.bonus) == (explicit.accepted, explicit.bonus)


def test_drawn_tokens_are_accepted_by_their_q() -> None:
    unlikely = SparseQ(np.arange(6, dtype=np.int32)[None], np.array([[0.999, *[0.0002] * 5]], np.float32))
    drawn = [answer(RESIDUAL, verify((token,), unlikely)).accepted for token in range(1, 6)]
    certain = [answer(RESIDUAL, verify((token,))).accepted for token in range(1, 6)]
    assert drawn == [1] * 5 and sum(certain) < 5


@pytest.mark.parametrize("sampling", [RESIDUAL, COUPLED])
def test_empty_chain_is_a_plain_step(sampling: SamplingParams) -> None:
    bonuses = {answer(sampling, verify((), q)).bonus for q in (None, one_hot([]))}
    assert len(bonuses) == 1


@pytest.mark.parametrize(
    ("sampling", "message", "sentence"),
    [
        (RESIDUAL, verify((1, 2), None, (-1, -1)), "can't verify a tree"),
        (COUPLED, verify((1,), one_hot([1])), "uses coupled sampling"),
        (RESIDUAL, verify((1,), one_hot([2])), "does not fit the chain"),
    ],
)
def test_chain_that_does_not_fit_the_rule_is_a_fault_with_a_reason(
    sampling: SamplingParams, message: Verify, sentence: str
) -> None:
    fault = answer(sampling, message)
    assert isinstance(fault, Fault) and fault.request == "r" and sentence in fault.message
