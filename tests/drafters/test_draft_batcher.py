"""Requests that share forwards prepare the same branches as alone; limited time goes to likely outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider.drafters import work_ahead
from outrider.drafters.drafter import Drafter
from outrider.drafters.fan_out import FAN_OUT_POLICIES, BranchRequest, Calibration, ForkPoint, divide_branches
from outrider.drafters.growth import BranchTask, Continuation, ReadyBranches
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.work_ahead import UNMEASURED_BRANCHES, Capacity, DraftBatcher, WorkAhead
from outrider.engine.forward_cost import ForwardCost
from outrider.engine.loading import load
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.drafting import draft_chains
from tests.slots import open_draft_tree
from tools.simulation.replay import ReplayDrafter, Script

TEXT = tuple(2 + 7 * i % 250 for i in range(400))
SCRIPT = Script((TEXT,), (0.7,), (0.5, 0.3), 258)
LENGTHS = (5, 40, 23)
GAPS = tuple(0.4 * rank for rank in range(12))
Found = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(params=["llama", "qwen3_5", "replay"])
def drafter(request: pytest.FixtureRequest, tiny_model: Callable[..., Any]) -> Drafter:
    return ReplayDrafter(SCRIPT) if request.param == "replay" else MlxDrafter(load(tiny_model(request.param)))


def start_requests(drafter: Drafter) -> list[WorkAhead]:
    works = []
    for number, length in enumerate(LENGTHS):
        tree = open_draft_tree(drafter, TEXT[:length], SamplingParams(temp=0.8, seed=number))
        works.append(WorkAhead(tree, (), FAN_OUT_POLICIES["best-first"], Calibration()))
    return works


def prepare_all(together: DraftBatcher, works: Sequence[WorkAhead], active: int = 1) -> list[Found]:
    """Advances the requests until all are done; returns the branches of each."""
    found: dict[int, Found] = {id(work): {} for work in works}
    while busy := [work for work in works if work.has_work]:
        for work, ready in zip(busy, together.advance(busy, active), strict=True):
            assert not isinstance(ready, OutriderError)
            found[id(work)] |= {entry.committed: entry.chain for entry in ready.entries} if ready else {}
    return list(found.values())


def test_batched_requests_prepare_the_branches_of_single_requests(drafter: Drafter) -> None:
    """Through continuations, branches, and commits with and without a branch, with a budget for all."""
    batched, alone = start_requests(drafter), start_requests(drafter)
    together = DraftBatcher()
    drafted = draft_chains(batched, [3, 2, 4])
    assert drafted == [draft_chains([work], [n])[0] for work, n in zip(alone, (3, 2, 4), strict=True)]
    chains = [found.chain if isinstance(found, Continuation) else () for found in drafted]
    for works in (batched, alone):
        for work, chain in zip(works, chains, strict=True):
            work.commit((), BranchTask(chain, 2, 6))
    for turn in range(4):
        found = prepare_all(together, batched)
        assert found == [prepare_all(DraftBatcher(), [work])[0] for work in alone]
        assert all(len(branches) == 6 for branches in found)
        for i, branches in enumerate(found):
            outcome = list(branches)[turn]
            new = outcome if i != turn else (7, 9)
            for work in (batched[i], alone[i]):
                work.commit(new, BranchTask(branches[outcome] if i != turn else (4,), 2, 6))
    assert [column_tokens(w.tree) for w in batched] == [column_tokens(w.tree) for w in alone]


def test_failed_request_of_a_batch_does_not_affect_the_others(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: in the forward, or when scores are read before and after it."""
    for where in ("candidates", "feed"):
        works, sound = start_requests(drafter), start_requests(drafter)
        for work in (*works, *sound):
            work.commit((), BranchTask((9, 8), 2, 4))

        def fails(*_: Any) -> Any:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(works[1].tree, where, fails, raising=False)
            if where == "feed":  # trees of a model are fed by it
                patch.setattr(works[1].tree, "begin", fails, raising=False)
            found = DraftBatcher().advance(works)
        wanted = DraftBatcher().advance(sound)
        assert isinstance(found[1], OutriderError) and "ZeroDivisionError" in str(found[1])
        assert [found[0], found[2]] == [wanted[0], wanted[2]]


def test_forwards_that_give_no_branches_are_counted_and_not_kept() -> None:
    """A drafter that feeds committed tokens for longer than a round gives none for as long as that lasts."""
    works, together = start_requests(ReplayDrafter(SCRIPT))[:1], DraftBatcher()
    state = [np.size(value) for value in vars(together).values()]
    for _ in range(50):
        works[0].commit((7, 9), BranchTask((4,), 2, 6))
        assert together.advance(works) == [None]
    assert [np.size(value) for value in vars(together).values()] == state
    measured = list[tuple[float, float]]()
    together.capacity.forwards.add = lambda rows, ms: measured.append((rows, ms))  # type: ignore[method-assign]
    (ready,) = together.advance(works)
    assert isinstance(ready, ReadyBranches) and len(ready.entries) == 6
    assert [rows for rows, _ in measured] == [pytest.approx((50 * 3 + 6) / 51)]


def points(chain: int, own_gap: float) -> list[ForkPoint | None]:
    return [*(ForkPoint(own_gap, GAPS) for _ in range(chain)), ForkPoint(None, GAPS)]


def test_budget_goes_to_likely_branches_and_leaves_no_request_out() -> None:
    sure, unsure = BranchRequest(points(3, 9.0), 16, 3), BranchRequest(points(3, 0.1), 16, 3)
    calibration = Calibration()
    assert divide_branches([sure, unsure], None, calibration) == [16, 16]
    assert divide_branches([sure, unsure], 32, calibration) == [16, 16]
    for budget in (8, 20):
        of_sure, of_unsure = divide_branches([sure, unsure], budget, calibration)
        assert of_sure + of_unsure == budget
        assert 0 < of_sure < of_unsure <= 16  # the sure one's next outcome is likely among its first few
    assert divide_branches([sure] * 5, 2, calibration) == [1] * 5
    assert divide_branches([sure, BranchRequest(sure.points, 0, 3)], 4, calibration) == [4, 0]
    assert divide_branches([], 4, calibration) == []


def test_capacity_is_the_number_of_branches_that_fit_in_a_round() -> None:
    capacity = Capacity()
    assert capacity.max_branches(3) == UNMEASURED_BRANCHES
    for turn in range(24):
        rows = 4 + 8 * (turn % 5)
        capacity.forwards.add(rows, 1.0 + 0.125 * rows)
        capacity.rounds.add(1, 25.0)
    assert capacity.max_branches(3) == (25.0 / 4 - 1.0) / 0.125
    assert capacity.max_branches(1) == (25.0 / 2 - 1.0) / 0.125
    for _ in range(100):
        capacity.rounds.add(1, 1.0)
    assert capacity.max_branches(5) == 0


def test_rows_of_a_forward_leave_time_for_others_unless_they_cost_little() -> None:
    costly, cheap = Capacity(), Capacity()
    assert costly.rows_per_forward() == UNMEASURED_BRANCHES
    for turn in range(24):
        rows = 4 + 8 * (turn % 5)
        costly.forwards.add(rows, 1.0 + 1.0 * rows)
        cheap.forwards.add(rows, 5.0 + 0.125 * rows)
        costly.rounds.add(1, 15.0)
        cheap.rounds.add(1, 15.0)
    assert costly.rows_per_forward() == 15 // 3 - 1
    assert (cheap.rows_per_forward() or 0) >= 5 / 0.125  # a forward itself costs as much as these
    alike = Capacity()
    for _ in range(24):
        alike.forwards.add(8, 9.0)
        alike.rounds.add(1, 15.0)
    assert alike.rows_per_forward() == 4  # forwards of eight rows alone do not show a row's cost, so fewer are tried
    for _ in range(3):
        alike.forwards.add(4, 9.0)
    assert (alike.rows_per_forward() or 0) > 8  # a row costs little


def test_capacity_is_learned_from_forwards_of_one_size() -> None:
    capacity = Capacity()
    for _ in range(20):
        capacity.forwards.add(8, 4.0)
        capacity.rounds.add(1, 20.0)
    assert capacity.max_branches(3) == 10


def test_time_of_an_unread_forward_is_counted_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLX, a forward that only feeds committed tokens seems to take no time, and the next one that of both."""
    batcher, made = DraftBatcher(), iter([([None], 30), ([ReadyBranches((), False)], 8)])
    milliseconds = iter([0, 0, 0, 40])
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: next(milliseconds) * MILLISECOND_NS)
    monkeypatch.setattr(work_ahead, "run_together", lambda steps: next(made))
    batcher.advance([])
    assert not batcher.capacity.forwards.seen
    batcher.advance([])
    assert batcher.capacity.forwards.seen == 1 and batcher.capacity.forwards(19) == 20.0


def test_stalled_round_hardly_changes_the_number_of_branches() -> None:
    """Such as when the server was suspended."""
    capacity = Capacity()
    for _ in range(20):
        capacity.forwards.add(8, 4.0)
        capacity.rounds.add(1, 20.0)
    capacity.rounds.add(1, 60_000.0)
    assert 10 <= (capacity.max_branches(3) or 0) <= 13
    for _ in range(100):
        capacity.rounds.add(1, 200.0)
    assert (capacity.max_branches(3) or 0) > 95


def test_stalled_forward_hardly_changes_the_cost_of_forwards() -> None:
    """Such as when the process was suspended: a hanging forward must still be noticed later."""
    cost = ForwardCost()
    for turn in range(20):
        cost.add(4 + 8 * (turn % 5), 1.0 + 0.125 * (4 + 8 * (turn % 5)))
    usual = cost(8)
    cost.add(8, 3_600_000.0)
    assert usual < cost(8) < 2 * usual
    for _ in range(100):
        cost.add(8, 100.0)
    assert cost(8) > 95.0  # forwards that have become slower count


def test_short_budget_is_shared_among_requests(tiny_model: Callable[..., Any]) -> None:
    """Each gets fewer branches than it requests, but of full depth and with the same tokens."""
    drafter = MlxDrafter(load(tiny_model("llama")))
    works, free = start_requests(drafter), start_requests(drafter)
    for work in (*works, *free):
        work.commit((), BranchTask((9, 8), 2, 12))
    together = DraftBatcher()
    for _ in range(16):
        together.capacity.forwards.add(10, 5.0)
        together.capacity.rounds.add(1, 27.0)  # three forwards of 9 ms: 18 rows
    found, wanted = prepare_all(together, works, active=3), prepare_all(DraftBatcher(), free)
    assert sum(map(len, found)) == 18 and all(found)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(theirs.get(outcome, chain) == chain and len(chain) == 2 for outcome, chain in ours.items())


def test_single_request_gets_all_requested_branches(tiny_model: Callable[..., Any]) -> None:
    drafter = MlxDrafter(load(tiny_model("llama")))
    work, together = start_requests(drafter)[0], DraftBatcher()
    for _ in range(16):
        together.capacity.forwards.add(10, 5.0)
        together.capacity.rounds.add(1, 1.0)
    work.commit((), BranchTask((), 2, 12))
    assert [len(found) for found in prepare_all(together, [work])] == [12]
    assert isinstance(together.advance([work])[0], ReadyBranches)
