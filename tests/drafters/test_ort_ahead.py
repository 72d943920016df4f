"""A head in the draft worker prepares the same branches by ONNX Runtime as by MLX, for several texts in one forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.fan_out import FAN_OUT_POLICIES, Calibration
from outrider.drafters.growth import BranchTask, Continuation
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import PairHead
from outrider.drafters.heads.kv_rows import PairKVRows
from outrider.drafters.heads.load import load_for_draft_worker
from outrider.drafters.heads.trees import PairTree
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtForward
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.drafting import draft_chains
from tests.target_worker.heads import (
    H,
    mtp_head,
    parallel_token_head,
    random_head,
    token_head,
    unrounded,
    write_feature_head,
)

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")

LONG = 260  # pairs, which ONNX Runtime reads in pieces
LENGTHS = (20, 7, LONG + 30)
MakeHead = Callable[[LoadedModel], PairHead]
Prepared = list[dict[tuple[int, ...], tuple[int, ...]]]


class SimulatedRequests:
    """Requests with a simulated target: most outcomes are prepared ones, and a position always has the same row."""

    def __init__(self, head: PairHead, target: LoadedModel, cpu: OrtForward | None, temp: float) -> None:
        draws = np.random.default_rng(1)
        drafter = HeadDrafter(head, target.vocab_size, cpu=cpu)
        self.together, self.texts = DraftBatcher(), [draws.integers(0, 200, n).tolist() for n in LENGTHS]
        self.sent = [0] * len(LENGTHS)
        raw = draws.standard_normal((max(LENGTHS) + 60, len(head.points) * H))
        self.rows = np.array(head.fuse(mx.array(raw, mx.float32)))
        self.works = [
            WorkAhead(
                drafter.open(text, SamplingParams(temp=temp, seed=seed)),
                (),
                FAN_OUT_POLICIES["best-first"],
                Calibration(),
                text,
            )
            for seed, text in enumerate(self.texts)
        ]

    def rounds(self, count: int) -> list[Prepared]:
        """The branches of each round: first after continuations, then after outcomes that mostly have a branch."""
        self.add_features(range(len(self.works)))
        found = []
        for work, continuation in zip(self.works, draft_chains(self.works, [3, 2, 4]), strict=True):
            assert isinstance(continuation, Continuation) and continuation.chain
            work.commit((), BranchTask(continuation.chain, 3, 6))
        for turn in range(count):
            found.append(self._branches())
            for number, (work, branches) in enumerate(zip(self.works, found[-1], strict=True)):
                outcome = list(branches)[turn % len(branches)]
                new = outcome if (number + turn) % 4 else (7, 9)  # an outcome without a branch
                work.commit(new, BranchTask(branches[outcome] if new == outcome else (4,), 3, 6))
                self.texts[number] += new
            self.add_features(number for number in range(len(self.works)) if (number + turn) % 3)  # others get it late
        return found

    def add_features(self, numbers: Any) -> None:
        for number in numbers:
            at, end = self.sent[number], len(self.texts[number]) - 1
            self.works[number].tree.add_features(at, self.rows[at:end])
            self.sent[number] = end

    def _branches(self) -> Prepared:
        found: Prepared = [{} for _ in self.works]
        while busy := [n for n, work in enumerate(self.works) if work.has_work]:
            for number, ready in zip(busy, self.together.advance([self.works[n] for n in busy]), strict=True):
                assert not isinstance(ready, OutriderError)
                found[number] |= {entry.committed: entry.chain for entry in ready.entries} if ready else {}
        return found


@pytest.mark.parametrize(
    ("make_head", "temp"), [(mtp_head, 0.8), (random_head, 0.0), (token_head, 0.8), (parallel_token_head, 0.8)]
)
def test_branches_by_onnx_runtime_equal_those_by_mlx(
    target: LoadedModel, fed: list[int], make_head: MakeHead, temp: float
) -> None:
    """Through hits, misses and late rows, and with a text that is read in pieces."""
    head = make_head(target)
    by_ort = SimulatedRequests(head, target, unrounded(head, target), temp)
    prepared = by_ort.rounds(8)
    assert max(fed) >= 6 * len(LENGTHS)
    assert any(isinstance(work.tree, PairTree) and work.tree._layout.prefix > LONG for work in by_ort.works)
    fed.clear()
    by_mlx = SimulatedRequests(head, target, None, temp)
    assert prepared == by_mlx.rounds(8) and not fed
    assert all(len(branches) == 6 for branches in prepared[0])
    columns = [[column_tokens(work.tree) for work in requests.works] for requests in (by_ort, by_mlx)]
    assert columns[0] == columns[1]


def test_a_loaded_head_uses_onnx_runtime(target: LoadedModel, fed: list[int], tmp_path: Path) -> None:
    assert target.folder is not None
    folder = write_feature_head(tmp_path / "head", target)
    drafter = load_for_draft_worker("eagle3", str(folder), str(target.folder), lambda stage: None)
    assert fed
    tree = drafter.open([1, 2, 3], SamplingParams())
    assert isinstance(tree, PairTree) and isinstance(tree.kv_rows, PairKVRows) and not tree.kv_rows.lazy
    assert drafter.head.weight_bytes < drafter.weight_bytes / 2  # ONNX Runtime has the others
    tree.add_features(0, np.array(drafter.head.fuse(mx.ones((2, len(drafter.head.points) * H)))))
    assert tree.read([1, 2, 3]) == 3
    assert len(tree.best(tree.feed([tree.root], [None]))) == 1
