"""The token tree of a package: every node equals an independent full run of its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.drafters.coreml.drafter import CoreMLDrafter, CoreMLTree
from outrider.drafters.coreml.runtimes import Inputs, Outputs, RuntimeFault
from outrider.drafters.drafter import DrafterFault, TokenTree
from outrider.drafters.fan_out import FAN_OUT_POLICIES, Calibration
from outrider.drafters.growth import BranchTask
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.work_ahead import WorkAhead
from outrider.engine.sampling import Sampler
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.coreml.conftest import CONTEXT, VOCAB, Converted
from tests.drafting import advance
from tests.harness.mil_interpreter import NumpyRuntime
from tests.slots import open_draft_tree

Figure = Callable[[str, float], None]
TOLERANCE = {"fp32": 1e-4, "fp16": 0.2}  # a tenth of the logits' deviation; a wrong mask or position costs far more
GREEDY = SamplingParams()


@contextmanager
def open_tree(made: Converted, tokens: Sequence[int], sampling: SamplingParams = GREEDY) -> Iterator[CoreMLTree]:
    yield open_draft_tree(made.drafter(), tokens, sampling)


def check_node(tree: TokenTree, node: int, path: list[int], model: nn.Module, tolerance: float) -> float:
    """Compares the scores of `node` with the last logits of a full run of `path`; returns the largest error."""
    logits = np.array(model(mx.array([path]))[0, -1].astype(mx.float32))
    gaps = np.empty(VOCAB)
    for candidate in tree.candidates([node], VOCAB)[0]:
        gaps[candidate.token] = candidate.gap
    error = float(np.abs(gaps - (logits.max() - logits)).max())
    assert error <= 2 * tolerance
    return error


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_eight_ragged_branches_have_the_scores_of_full_runs(
    converted: Callable[..., Converted], text: list[int], weights: str, figure: Figure
) -> None:
    made, draws = converted("llama", weights=weights), np.random.default_rng(3)
    model, prompt = made.mlx(), text[:90]
    with open_tree(made, prompt) as tree:
        check_node(tree, tree.root, prompt, model, TOLERANCE[weights])
        tips, paths = [tree.root] * 8, [list(prompt) for _ in range(8)]
        for depth in range(4):
            alive = range(8 - depth)  # ragged: a branch ends at every depth
            tokens = draws.integers(0, VOCAB, len(alive)).tolist()
            fed = tree.feed([tips[branch] for branch in alive], tokens)
            for branch, token, node in zip(alive, tokens, fed, strict=True):
                tips[branch] = node
                paths[branch].append(token)
        errors = []
        for tip, path in zip(tips, paths, strict=True):
            errors.append(check_node(tree, tip, path, model, TOLERANCE[weights]))
            assert np.argmin([c.gap for c in tree.candidates([tip], 4)[0]]) == 0
        figure(f"tree 8 x 4, ragged, {weights}: largest error of a gap to the best", max(errors))


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_scores_stay_exact_through_rollback_and_refeeding(
    converted: Callable[..., Converted], text: list[int], weights: str, figure: Figure
) -> None:
    """Twenty rounds of drafting and committing, more drafted tokens than the cache has slots."""
    made, draws = converted("llama", weights=weights), np.random.default_rng(4)
    model, known = made.mlx(), list(text[:70])
    with open_tree(made, known) as tree:
        for turn in range(20):
            first = tree.feed([tree.root] * 12, draws.choice(VOCAB, 12, replace=False).tolist())
            tips = tree.feed(first, draws.integers(0, VOCAB, 12).tolist())
            tips = tree.feed(tips, [None] * 12)
            chosen = int(draws.integers(12))
            taken = int(draws.integers(1, 4))
            path = [first[chosen], first[chosen] + 12, tips[chosen]][:taken]
            tree.best(tips)  # so that all of them are computed, and take their slots
            tree.commit(path)
            known = column_tokens(tree)
            assert tree.committed_len == len(known) and tree.room == CONTEXT - len(known)
            if taken == 2:  # what was drafted beyond the commit is still there
                assert tree.child(tree.root, tree.best([tree.root])[0]) == tips[chosen]
            if turn % 6 == 5:
                check_node(tree, tree.root, known, model, TOLERANCE[weights])
        error = check_node(tree, tree.root, known, model, TOLERANCE[weights])
        figure(f"rollback and re-feed, 20 rounds, {weights}: largest error of a gap to the best", error)


def test_a_commit_keeps_descendants_and_drops_the_rest(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama", weights="fp32")
    with open_tree(made, text[:10]) as tree:
        assert (tree.root, tree.next_node, tree.committed_len) == (0, 1, 10)
        left, right = tree.feed([tree.root, tree.root], [5, 6])
        (below,) = tree.feed([left], [7])
        assert (left, right, below) == (1, 2, 3)
        assert tree.child(tree.root, 6) == right and tree.child(tree.root, 9) is None
        tree.commit([left])
        assert tree.root == left and tree.child(left, 7) == below
        assert column_tokens(tree) == [*text[:10], 5]
        check_node(tree, below, [*text[:10], 5, 7], made.mlx(), 1e-4)
        with pytest.raises(InvalidRequest, match="not in the tree"):
            tree.best([right])
        (other,) = tree.feed([below], [8])
        with pytest.raises(InvalidRequest, match="does not follow"):
            tree.commit([other])
        with pytest.raises(InvalidRequest, match="not in the tree"):
            tree.feed([other, tree.next_node], [1, None])


def test_a_parent_may_be_fed_in_the_same_call(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("qwen3", weights="fp32")
    with open_tree(made, text[:10]) as tree:
        first = tree.next_node
        nodes = tree.feed([tree.root, first, first + 1, tree.root], [5, 6, 7, 8])
        model = made.mlx()
        check_node(tree, nodes[2], [*text[:10], 5, 6, 7], model, 1e-4)
        check_node(tree, nodes[3], [*text[:10], 8], model, 1e-4)


def test_feed_beyond_the_largest_function_is_split(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama", weights="fp32")
    with open_tree(made, text[:10]) as tree:
        first = tree.next_node
        nodes = tree.feed([tree.root, *range(first, first + 39)], text[10:50])
        check_node(tree, nodes[-1], text[:50], made.mlx(), 1e-4)


def test_feeding_none_feeds_the_best_token(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama", weights="fp32")
    model, path = made.mlx(), list(text[:20])
    with open_tree(made, path) as tree:
        nodes = [tree.root]
        for _ in range(10):
            nodes += tree.feed(nodes[-1:], [None])
        drafted = tree.best(nodes)
        for token in drafted:
            assert token == int(model(mx.array([path]))[0, -1].argmax())
            path.append(token)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temp=0.8, seed=11),
        SamplingParams(temp=1.0, top_p=0.9, seed=12),
        SamplingParams(repetition_penalty=1.3, presence_penalty=2.0),
    ],
)
def test_scores_follow_the_sampling_contract(
    converted: Callable[..., Converted], text: list[int], sampling: SamplingParams
) -> None:
    made = converted("llama", weights="fp32")
    model, path, sampler = made.mlx(), list(text[:20]), Sampler(sampling, VOCAB)
    with open_tree(made, path, sampling) as tree:
        nodes = [tree.root]
        for _ in range(12):
            nodes += tree.feed(nodes[-1:], [None])
        for node, token in zip(nodes, tree.best(nodes), strict=True):
            logits = model(mx.array([path]))[0, -1:].astype(mx.float32)
            expected = np.array(sampler.scores(logits, [len(path)], [path])[0])
            assert token == int(expected.argmax())
            found = {candidate.token: candidate.gap for candidate in tree.candidates([node], VOCAB)[0]}
            possible = np.flatnonzero(expected > -np.inf)
            assert set(found) == set(possible.tolist())
            assert all(abs(found[t] - (expected.max() - expected[t])) < 1e-3 for t in possible.tolist())
            path.append(token)


def test_residual_draws_equal_those_of_the_mlx_drafter(converted: Callable[..., Converted], text: list[int]) -> None:
    """The same tokens from the same q, after given and after drawn tokens."""
    made, drawn = converted("llama", weights="fp32"), []
    sampling = SamplingParams(temp=1.0, seed=8, rule="residual", saguaro=0.5, q_width=6)
    coreml, mlx = made.drafter(), MlxDrafter.load(str(made.model_path), lambda stage: None)
    for drafter in (coreml, mlx):
        tree = open_draft_tree(drafter, text[:20], sampling, cached=2)
        nodes = [tree.root, *tree.feed([tree.root, tree.root], [5, 6])]
        for _ in range(3):
            nodes += tree.feed(nodes[-2:], [None, None])
        tree.commit(nodes[1:2])
        kept = [nodes[1], nodes[3], nodes[5], nodes[7]]
        q = tree.drawn_from(kept)
        assert q is not None and q.fits(tree.best(kept)) and tree.drawn_from([]) is None
        drawn.append((tree.best(kept), q))
    (tokens, q), (expected, expected_q) = drawn
    assert tokens == expected
    order, expected_order = q.ids.argsort(axis=1), expected_q.ids.argsort(axis=1)
    assert (np.sort(q.ids) == np.sort(expected_q.ids)).all()
    shares = [np.take_along_axis(x.probs, o, 1) for x, o in ((q, order), (expected_q, expected_order))]
    np.testing.assert_allclose(shares[0], shares[1], atol=1e-4)


def test_several_requests_share_a_drafter(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama", weights="fp32")
    drafter, model = made.drafter(), made.mlx()
    trees = [open_draft_tree(drafter, text[first : first + 30], GREEDY) for first in (0, 50)]
    tips = [tree.feed([tree.root], [9])[0] for tree in trees]
    trees[0].close()
    again = open_draft_tree(drafter, text[100:110], GREEDY)  # takes over the closed one's buffers
    check_node(trees[1], tips[1], [*text[50:80], 9], model, 1e-4)
    check_node(again, again.root, text[100:110], model, 1e-4)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_undrafted_text_is_read_in_pieces(converted: Callable[..., Converted], text: list[int], weights: str) -> None:
    """After rejected and after accepted drafts, several times; afterwards the tree grows as usual."""
    made = converted("llama", weights=weights)
    model, known = made.mlx(), list(text[:20])
    with open_tree(made, known) as tree:
        for count, pieces in ((1, 1), (80, 2), (10, 1)):
            fed = tree.feed([tree.root] * 3, [1, 2, 3])
            tree.feed(fed, [None] * 3)
            known += text[len(known) : len(known) + count]
            for _ in range(pieces):
                tree.read(known[tree.committed_len :])
            assert column_tokens(tree) == known and tree.committed_len == len(known)
            check_node(tree, tree.root, known, model, TOLERANCE[weights])
            after = tree.feed([tree.root, tree.root], [7, 8])
            check_node(tree, after[1], [*known, 8], model, TOLERANCE[weights])
            tree.commit(after[:1])
            known.append(7)
        with pytest.raises(DrafterFault, match="context"):
            tree.read_all([5] * CONTEXT)


def test_work_ahead_runs_on_a_core_ml_tree(converted: Callable[..., Converted], text: list[int]) -> None:
    """Every branch is the model's own greedy continuation of its outcome."""
    made = converted("llama", weights="fp32")
    model, known = made.mlx(), list(text[:24])
    with open_tree(made, known) as tree:
        work = WorkAhead(tree, (), FAN_OUT_POLICIES["best-first"], Calibration())
        work.commit((), BranchTask((), 3, 6))
        for _ in range(3):
            chains: dict[tuple[int, ...], tuple[int, ...]] = {}
            while work.has_work:
                ready = advance(work)
                chains.update({e.committed: e.chain for e in (ready.entries if ready is not None else ())})
            assert len(chains) == 6
            for outcome, chain in chains.items():
                path = [*known, *outcome]
                for token in chain:
                    assert token == int(model(mx.array([path]))[0, -1].argmax())
                    path.append(token)
            committed, verifying = next(iter(chains.items()))
            known += committed
            work.commit(committed, BranchTask(verifying, 3, 6))
        assert column_tokens(tree) == known


def test_tree_closed_while_its_prompt_is_read_leaves_no_state_behind(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    made = converted("llama")
    drafter = made.drafter()
    tree = drafter.open(text, GREEDY)
    assert tree.read(text) == 64
    tree.close()
    tree = open_draft_tree(drafter, text[:10], GREEDY)  # takes over the closed one's buffers
    check_node(tree, tree.root, text[:10], made.mlx(), TOLERANCE["fp16"])


def test_the_smallest_function_that_fits_is_called(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama")
    runtime = _RecordingRuntime(made)
    drafter = CoreMLDrafter(made.package, runtime)
    tree = open_draft_tree(drafter, text[:1], GREEDY)
    for rows in (1, 2, 8, 9, 17):
        tree.best(tree.feed([tree.root] * rows, list(range(rows))))
    assert runtime.calls == ["q1", "q1", "q8", "q8", "q16", "q32"]


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [([1] * 256, "the draft model's context is 256"), ([1, VOCAB], "is not among the")],
)
def test_invalid_prompt_is_refused(converted: Callable[..., Converted], tokens: list[int], sentence: str) -> None:
    with pytest.raises(OutriderError, match=sentence), open_tree(converted("llama"), tokens):
        pass


def test_feeding_a_full_context_is_refused(converted: Callable[..., Converted], text: list[int]) -> None:
    with open_tree(converted("llama"), [*text, *text][: CONTEXT - 1]) as tree:
        tree.commit(tree.feed([tree.root], [1]))
        assert tree.room == 0
        tree.best([tree.root])
        with pytest.raises(DrafterFault, match="context of 256 tokens is full"):
            tree.feed([tree.root], [1])


def test_too_many_drafted_tokens_are_refused(converted: Callable[..., Converted], text: list[int]) -> None:
    with (
        open_tree(converted("llama"), [*text, *text][: CONTEXT - 1]) as tree,
        pytest.raises(DrafterFault, match="slots"),
    ):
        for _ in range(20):
            tree.best(tree.feed([tree.root] * 8, list(range(8))))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_end_drafting_for_the_request(
    converted: Callable[..., Converted], text: list[int], bad: float
) -> None:
    made = converted("llama")
    runtime = _RecordingRuntime(made)
    drafter = CoreMLDrafter(made.package, runtime)
    tree = open_draft_tree(drafter, text[:10], GREEDY)
    runtime.poison = bad
    for _ in range(2):
        with pytest.raises(DrafterFault, match="NaN or infinite"):
            tree.feed([tree.root], [1])
    tree.close()
    runtime.poison = None
    other = open_draft_tree(drafter, text[:10], GREEDY)  # the next request is not affected
    assert other.best([other.root])


def test_keys_that_are_not_finite_do_not_reach_later_requests(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    """A key that is NaN makes every score NaN even in a masked slot, and the cache of a closed text is reused."""
    made = converted("llama")
    runtime = _RecordingRuntime(made)
    drafter = CoreMLDrafter(made.package, runtime)
    runtime.nan_output = "k_new"
    with pytest.raises(DrafterFault, match="returned keys that are NaN or infinite"):
        open_draft_tree(drafter, text[:100], GREEDY)
    runtime.nan_output = ""
    tree = open_draft_tree(drafter, text[:10], GREEDY)
    check_node(tree, tree.root, text[:10], made.mlx(), TOLERANCE["fp16"])


def test_failed_device_raises_a_runtime_fault(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("llama")
    runtime = _RecordingRuntime(made)
    drafter = CoreMLDrafter(made.package, runtime)
    tree = open_draft_tree(drafter, text[:10], GREEDY)
    runtime.broken = True
    with pytest.raises(RuntimeFault, match="out of order"):
        tree.best(tree.feed([tree.root], [1]))


def test_input_buffers_are_allocated_once(converted: Callable[..., Converted], text: list[int]) -> None:
    """Core ML releases inputs late, so the buffers that it was given must never be freed."""
    made = converted("llama")
    runtime = _RecordingRuntime(made)
    drafter = CoreMLDrafter(made.package, runtime)
    for _ in range(2):
        tree = open_draft_tree(drafter, text[:10], GREEDY)
        tree.best(tree.feed([tree.root] * 8, list(range(8))))
        tree.best(tree.feed([tree.root] * 8, list(range(8))))
        tree.close()
    assert set(runtime.buffers) == {"q1", "q8", "q16"}
    for seen in runtime.buffers.values():
        assert len(seen) == 6  # x, cos, sin, mask, k_past, v_past, each always the same memory


class _RecordingRuntime:
    """The reference interpreter, which records its calls and can be made to fail."""

    name = "the watched runtime"

    def __init__(self, made: Converted) -> None:
        self._inner = NumpyRuntime(made.package.path)
        self.calls: list[str] = []
        self.buffers: dict[str, set[int]] = {}
        self.poison: float | None = None
        self.nan_output = ""
        self.broken = False

    def call(self, function: str, inputs: Inputs) -> Outputs:
        self.calls.append(function)
        self.buffers.setdefault(function, set()).update(array.ctypes.data for array in inputs.values())
        if self.broken:
            raise RuntimeFault("the watched runtime is out of order")
        outputs = self._inner.call(function, inputs)
        if self.nan_output:
            outputs[self.nan_output][0, 0, 0, 0] = np.nan
        if self.poison is not None:
            outputs["logits_0"][0, 3, 0, 0] = self.poison
        return outputs
