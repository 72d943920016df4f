"""Residual sampling gives the target's own distribution; every known mistake fails the same check.

The toy model has five tokens: a row of TARGET gives the logits after each token, and a row of another table those of
the draft. The engine draws, accepts and resamples. Chi-square tests compare the frequencies of the tokens, and of the
pairs of tokens, that follow each token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from scipy.special import chdtrc

from outrider.engine import residual
from outrider.engine.loading import LoadedModel
from outrider.engine.noise import Purpose, derive_seed
from outrider.engine.residual import Draws, ResidualSampler, draw_tokens
from outrider.engine.sampling import Sampler
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import (
    ROOT,
    DraftTree,
    SparseQ,
    accepted_path,
    first_branch,
    merge_trees,
    node_depths,
    one_hot,
)
from tests.forwards import decode_pipelined
from tests.logprobs import filtered_logprobs
from tests.slots import open_slots, verify

V = 5
TOKENS = 2000
# Seeds are fixed, so a correct program passes always; a wrong one is off by many orders of magnitude.
ALPHA, CAUGHT = 1e-3, 1e-8
PARAMS = SamplingParams(temp=1.0, seed=11, rule="residual")
_rng = np.random.default_rng(1)
TARGET = _rng.normal(size=(V, V)).astype(np.float32) * 1.2
DRAFT = TARGET + _rng.normal(size=(V, V)).astype(np.float32)
UNRELATED = -DRAFT / 2
LOG_P = ResidualSampler(PARAMS, V).log_p(mx.array(TARGET))


@dataclass(frozen=True)
class Chain:
    tokens: list[int]
    q: SparseQ


Propose = Callable[[Sequence[int]], Chain]


def drafted(
    text: Sequence[int],
    depth: int = 3,
    width: int = V,
    saguaro: float = 1.0,
    table: np.ndarray = DRAFT,
    fork: int | None = None,
    seed: int = 11,
) -> Chain:
    """Proposes a chain after `text`, correctly: drawn from the q that it reports."""
    draws, tokens, ids, probs = Draws(seed, width, saguaro, 2), list(text), [], []
    keys = [derive_seed(seed, Purpose.DRAFT, len(text) - 1 if fork is None else fork)]
    for _ in range(depth):
        chosen, drawn = draw_tokens(draws, keys, [len(tokens)], table[tokens[-1]][None])
        tokens.append(int(chosen[0]))
        ids.append(drawn.ids[0])
        probs.append(drawn.probs[0])
    return Chain(tokens[len(text) :], SparseQ(np.array(ids, np.int32), np.array(probs, np.float32)))


def generated_text(
    propose: Propose, sampler: ResidualSampler | None = None, log_p: np.ndarray = LOG_P, count: int = TOKENS
) -> list[int]:
    """Generates a text in rounds, each of which verifies the chain that `propose` returns for the text so far."""
    sampler = sampler or ResidualSampler(PARAMS, V)
    text = [0]
    while len(text) < count:
        chain = propose(text)
        base, rows = len(text), log_p[[text[-1], *chain.tokens]]
        k = 0
        if chain.tokens:
            k = sampler.accepted(rows[:-1], range(base, base + len(chain.tokens)), chain.tokens, chain.q)
        rejected = chain.q.part(k, k + 1) if k < len(chain.tokens) else None
        text += [*chain.tokens[:k], sampler.resample(rows[k], base + k, rejected)]
    return text[:count]


def p_values(text: Sequence[int], log_p: np.ndarray = LOG_P) -> tuple[float, float]:
    """P-values for the tokens, and for the pairs of tokens, that follow each token."""
    p = np.exp(log_p.astype(np.float64))
    singles = Counter((a, (b,)) for a, b in pairwise(text))
    pairs = Counter((text[i], (text[i + 1], text[i + 2])) for i in range(0, len(text) - 2, 2))
    after = {a: {(b,): p[a, b] for b in range(V)} for a in range(V)}
    after_two = {a: {(b, c): p[a, b] * p[b, c] for b in range(V) for c in range(V)} for a in range(V)}
    return _p_value(singles, after), _p_value(pairs, after_two)


def _p_value(counted: Counter, expected: dict) -> float:
    """Chi-square test over all first tokens; cells with an expected count below five are pooled."""
    statistic, freedom = 0.0, 0
    for first, shares in expected.items():
        seen = {rest: counted[first, rest] for rest in shares}
        total = sum(seen.values())
        if any(seen[rest] and not share for rest, share in shares.items()):
            return 0.0
        common = [rest for rest, share in shares.items() if share * total >= 5]
        cells = [(seen[rest], shares[rest] * total) for rest in common]
        rare = (total - sum(s for s, _ in cells), total - sum(e for _, e in cells))
        if rare[1] >= 1:
            cells.append(rare)
        statistic += sum((s - e) ** 2 / e for s, e in cells)
        freedom += max(len(cells) - 1, 0)
    return float(chdtrc(freedom, statistic))


# --- exact, whatever is proposed ------------------------------------------------------------------------------------


def certain(text: Sequence[int]) -> Chain:
    """Proposes the likeliest tokens without drawing, as n-grams do."""
    tokens = list(text)
    for _ in range(3):
        tokens.append(int(DRAFT[tokens[-1]].argmax()))
    return Chain(tokens[len(text) :], one_hot(tokens[len(text) :]))


def mixed(text: Sequence[int]) -> Chain:
    """Proposals of all kinds and depths; the text so far decides which."""
    match sum(text[-3:]) % 4:
        case 0:
            return drafted(text)
        case 1:
            return certain(text)
        case 2:
            return drafted(text, 1, 2, 0.4)
    return drafted(text, 0)


EXACT: dict[str, Propose] = {
    "saguaro, truncated": lambda text: drafted(text, width=3, saguaro=0.3),
    "one-hot": certain,
    "any mix": mixed,
    "a stranger": lambda text: drafted(text, table=UNRELATED),
}


@pytest.mark.parametrize("name", EXACT)
def test_texts_have_the_targets_distribution(name: str) -> None:
    assert min(p_values(generated_text(EXACT[name]))) > ALPHA


def test_residual_texts_follow_p_under_filters_and_temperature() -> None:
    params = SamplingParams(temp=0.7, top_p=0.9, min_p=0.02, top_k=4, seed=5, rule="residual")
    sampler = ResidualSampler(params, V)
    log_p = sampler.log_p(mx.array(TARGET))
    expected = np.array(mx.softmax(filtered_logprobs(mx.array(TARGET), None, params), axis=-1))
    assert np.allclose(np.exp(log_p), expected, atol=1e-6) and (expected == 0).any()
    assert min(p_values(generated_text(drafted, sampler, log_p), log_p)) > ALPHA


# --- through trees, and through merged proposals of two drafters ------------------------------------------------------

COUPLED = SamplingParams(temp=1.0, seed=11)


def tree_of(text: Sequence[int], best: Sequence[Sequence[int]], draws: random.Random) -> DraftTree:
    """A drafter's best few tokens, forked at each node of depth 0 and 1."""
    tokens, parents, tips = list[int](), list[int](), [(ROOT, text[-1], 0)]
    for node, last, depth in tips:
        for token in best[last][: draws.randint(1, 3)] if depth < 2 else ():
            tips.append((len(tokens), token, depth + 1))
            tokens.append(token)
            parents.append(node)
    return DraftTree(tuple(tokens), tuple(parents))


Choose = Callable[[Sequence[Sequence[int]], int, Sequence[int], DraftTree], list[int]]


def coupled(choose: Choose, count: int = 3000) -> list[int]:
    """Generates a text in rounds, each of which verifies the merged trees of two drafters.

    `choose` returns the target's choice after each node, from its choices for all tokens and positions.
    """
    sampler, draws = Sampler(COUPLED, V), random.Random(3)
    noise = mx.array(np.stack([sampler.noise_at(position) for position in range(count + 8)]))
    scores = sampler.filtered(sampler.penalise(mx.array(TARGET)))[:, None] + noise[None]
    own = mx.argmax(scores, axis=-1).tolist()  # own[token][position]: the target's choice after `token`
    drafters = [np.argsort(-table).tolist() for table in (DRAFT, UNRELATED)]
    text, accepted = [0], 0
    while len(text) < count:
        first, other = (tree_of(text, best, draws) for best in draws.sample(drafters, 2))
        both = merge_trees(first, other, 12)
        choices = choose(own, len(text), text, DraftTree(both.tokens, both.parents))
        path = accepted_path(both.tokens, both.parents, choices)
        accepted += len(path)
        text += [*(both.tokens[node] for node in path), choices[path[-1] + 1 if path else 0]]
    assert accepted > count / 4
    return text[:count]


def correct_choices(own: Sequence[Sequence[int]], base: int, text: Sequence[int], tree: DraftTree) -> list[int]:
    """Each row uses the noise of its own position, as it must."""
    places = [0, *(depth + 1 for depth in node_depths(tree.parents))]
    return [own[token][base + place] for token, place in zip([text[-1], *tree.chain], places, strict=True)]


def of_another_branch(own: Sequence[Sequence[int]], base: int, text: Sequence[int], tree: DraftTree) -> list[int]:
    """Wrong: each row uses the choice of the row before it."""
    choices = correct_choices(own, base, text, tree)
    return [choices[-1], *choices[:-1]]


def by_the_draft(own: Sequence[Sequence[int]], base: int, text: Sequence[int], tree: DraftTree) -> list[int]:
    """Wrong: the first drafted token is sometimes accepted unchecked."""
    choices = correct_choices(own, base, text, tree)
    return [tree.chain[0], *choices[1:]] if base % 5 == 0 else choices


def test_coupled_texts_of_united_trees_have_the_targets_distribution() -> None:
    text = coupled(correct_choices)
    assert min(p_values(text)) > ALPHA
    sampler = Sampler(COUPLED, V)
    rows = np.array(sampler.scores(mx.array(TARGET[text[:999]]), range(1, 1000)))
    assert text[1:1000] == rows.argmax(axis=-1).tolist()  # the text of plain decoding


@pytest.mark.parametrize("choose", [of_another_branch, by_the_draft])
def test_wrong_verification_of_a_tree_is_detected(choose: Choose) -> None:
    assert min(p_values(coupled(choose, TOKENS))) < CAUGHT


def of_a_union(text: Sequence[int], peek: bool = False) -> Chain:
    """Two drafters draw a chain each, and residual sampling verifies one branch of their merged tree, with its q.

    Which one must not depend on the drawn tokens. `peek`: it does, the chain with the smaller token is chosen.
    """
    depth = 1 if peek else 2
    chains = [drafted(text, depth, table=table, seed=seed) for table, seed in ((DRAFT, 12), (UNRELATED, 13))]
    lead = int(chains[0].tokens > chains[1].tokens) if peek else len(text) % 2
    first, other = (DraftTree(tuple(chain.tokens)) for chain in (chains[lead], chains[1 - lead]))
    both = merge_trees(first, other, 12)
    tokens = [both.tokens[node] for node in first_branch(both.parents)]
    return Chain(tokens, chains[lead].q)


def test_residual_texts_of_united_drafters_have_the_targets_distribution() -> None:
    assert min(p_values(generated_text(of_a_union, count=2500))) > ALPHA


def test_union_branch_chosen_by_its_drawn_tokens_is_detected() -> None:
    assert min(p_values(generated_text(partial(of_a_union, peek=True), count=2500))) < CAUGHT


# --- every known mistake is detected --------------------------------------------------------------------------------


def _q_along(chain: Chain, text: Sequence[int], table: np.ndarray) -> SparseQ:
    rows = np.exp(table[[text[-1], *chain.tokens[:-1]]])
    ids = np.tile(np.arange(V, dtype=np.int32), (len(rows), 1))
    return SparseQ(ids, (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32))


def unscaled(text: Sequence[int]) -> Chain:
    chain = drafted(text, saguaro=0.3)
    return Chain(chain.tokens, _q_along(chain, text, DRAFT))


def untruncated(text: Sequence[int]) -> Chain:
    chain = drafted(text, width=2)
    return Chain(chain.tokens, _q_along(chain, text, DRAFT))


def of_another_temperature(text: Sequence[int]) -> Chain:
    chain = drafted(text, table=DRAFT * 2)
    return Chain(chain.tokens, _q_along(chain, text, DRAFT))


def chosen_by_content(text: Sequence[int]) -> Chain:
    """Proposes, of three branches for one outcome, the one with the smallest token."""
    return min((drafted(text, 1, seed=seed) for seed in (11, 12, 13)), key=lambda chain: chain.tokens)


def cut_by_value(text: Sequence[int]) -> Chain:
    """Ends the chain before a token of little value, so that its tokens decide its length."""
    chain = drafted(text)
    length = next((i for i, token in enumerate(chain.tokens) if token in (0, 1)), len(chain.tokens))
    return Chain(chain.tokens[:length], chain.q.part(0, length))


def knows_the_targets_noise(text: Sequence[int]) -> Chain:
    """Draws several chains and proposes one that it knows will be accepted."""
    for seed in range(12, 18):
        one = drafted(text, 1, table=UNRELATED, seed=seed)
        if ResidualSampler(PARAMS, V).accepted(LOG_P[[text[-1]]], [len(text)], one.tokens, one.q):
            break
    return one


class LeaksRejectedDraft:
    """The token drafted after a rejected one decides whether the next round has a chain, as in a fan-out that reads it.

    With `fork` None, draws are keyed by where their chain begins, as in the engine; otherwise by their position alone.
    """

    def __init__(self, fork: int | None) -> None:
        self._fork, self._last, self._at = fork, Chain([], one_hot([])), 0

    def __call__(self, text: Sequence[int]) -> Chain:
        lost = self._last.tokens[len(text) - self._at :]
        self._last, self._at = drafted(text, 4, fork=self._fork, table=UNRELATED), len(text)
        return self._last if not lost or lost[0] in (0, 1) else drafted(text, 0)


FAULTS: dict[str, tuple[Callable[[], Propose], int]] = {
    "unscaled q": (lambda: unscaled, 1000),
    "untruncated q": (lambda: untruncated, 1000),
    "q of another temperature": (lambda: of_another_temperature, 1500),
    "content decides between branches": (lambda: chosen_by_content, 1000),
    "a value ends the chain": (lambda: cut_by_value, 1000),
    "known noise": (lambda: knows_the_targets_noise, TOKENS),
    "noise that was seen": (lambda: LeaksRejectedDraft(0), 3000),
}
"""Name -> the wrong proposal, and the length of a text that reveals it."""


@pytest.mark.parametrize("name", FAULTS)
def test_proposal_with_a_wrong_q_or_a_biased_choice_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseQ, "fits", lambda *_: True)
    propose, count = FAULTS[name]
    assert min(p_values(generated_text(propose(), count=count))) < CAUGHT


def test_draws_keyed_by_fork_keep_the_target_distribution() -> None:
    assert min(p_values(generated_text(LeaksRejectedDraft(None), count=3000))) > ALPHA


class GreedyOnGuesses(ResidualSampler):
    """The rule of the paper's reference code for fallback tokens: accept the target's best token, else sample p."""

    def accepted(self, log_p, positions, chain, q):
        holds = log_p.argmax(axis=1) == np.array(chain)
        return len(chain) if holds.all() else int(holds.argmin())

    def resample(self, log_p, position, q):
        return super().resample(log_p, position, None)


class Unadjusted(ResidualSampler):
    """Draws the replacement of a rejected token from p instead of the residual."""

    def resample(self, log_p, position, q):
        return super().resample(log_p, position, None)


@pytest.mark.parametrize(
    ("rule", "propose", "count"),
    [(GreedyOnGuesses, certain, 1000), (Unadjusted, drafted, 1500), (Unadjusted, certain, 1000)],
)
def test_wrong_acceptance_rule_is_detected(rule: type[ResidualSampler], propose: Propose, count: int) -> None:
    assert min(p_values(generated_text(propose, rule(PARAMS, V), count=count))) < CAUGHT


# --- the rule for single tokens -------------------------------------------------------------------------------------


def test_draft_equal_to_the_target_is_always_accepted() -> None:
    sampler, text = ResidualSampler(PARAMS, V), [0]
    for _ in range(200):
        chain = drafted(text, table=TARGET)
        rows = LOG_P[[text[-1], *chain.tokens[:-1]]]
        assert sampler.accepted(rows, range(len(text), len(text) + 3), chain.tokens, chain.q) == 3
        text += chain.tokens


def test_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    sampler, p, q = ResidualSampler(PARAMS, V), np.exp(LOG_P[0]), np.exp(DRAFT[0]) / np.exp(DRAFT[0]).sum()
    held, positions = 0, range(1, 2001)
    keys = [derive_seed(11, Purpose.DRAFT, position - 1) for position in positions]
    chosen, drawn = draw_tokens(Draws(11, V, 1.0, 2), keys, positions, np.tile(DRAFT[0], (2000, 1)))
    for position, token, ids, probs in zip(positions, chosen, drawn.ids, drawn.probs, strict=True):
        held += sampler.accepted(LOG_P[[0]], [position], [int(token)], SparseQ(ids[None], probs[None]))
    assert abs(held / 2000 - np.minimum(p, q).sum()) < 0.03


def test_token_without_probability_or_with_an_equal_clock_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = ResidualSampler(PARAMS, V)
    never = LOG_P[[0]].copy()
    never[0, 3] = -np.inf
    assert not any(sampler.accepted(never, [position], [3], one_hot([3])) for position in range(200))
    monkeypatch.setattr(residual, "exponential_numpy", lambda *_: np.zeros(1, np.float32))
    sure = np.full((1, V), -np.inf, np.float32)
    sure[0, 2] = 0.0
    assert sampler.accepted(sure, [1], [2], one_hot([2])) == 0  # log q/p is 0, and 0 is not above it


def test_token_is_drawn_from_p_when_the_residual_is_empty() -> None:
    sampler = ResidualSampler(PARAMS, V)
    own = SparseQ(np.arange(V, dtype=np.int32)[None], np.exp(LOG_P[[0]]) + np.float32(1e-6))
    found = [sampler.resample(LOG_P[0], position, own) for position in range(300)]
    assert found == [sampler.resample(LOG_P[0], position, None) for position in range(300)] and len(set(found)) == V


def test_rejected_one_hot_token_is_never_resampled() -> None:
    sampler = ResidualSampler(PARAMS, V)
    assert all(sampler.resample(LOG_P[0], position, one_hot([2])) != 2 for position in range(500))


def test_q_ids_beyond_the_target_vocabulary_are_ignored() -> None:
    q = SparseQ(np.array([[1, V + 3]], np.int32), np.array([[0.5, 0.5]], np.float32))
    rest = residual.residual(LOG_P[0], q)
    alone = residual.residual(LOG_P[0], SparseQ(q.ids[:, :1], q.probs[:, :1]))
    assert (rest == alone).all()


@pytest.mark.parametrize(
    "q",
    [
        one_hot([1]),
        SparseQ(np.array([[1], [3]], np.int32), np.ones((2, 1), np.float32)),
        SparseQ(np.array([[1], [2]], np.int32), np.full((2, 1), 0.5, np.float32)),
        SparseQ(np.array([[1], [2]], np.int32), np.ones((2, 2), np.float32)),
    ],
    ids=["too few rows", "another token", "half a distribution", "two shapes"],
)
def test_a_q_that_does_not_fit_its_chain_is_refused(q: SparseQ) -> None:
    with pytest.raises(InvalidRequest, match="q does not fit"):
        ResidualSampler(PARAMS, V).accepted(LOG_P[[0, 1]], [1, 2], [1, 2], q)


# --- in the target --------------------------------------------------------------------------------------------------

PROMPT = [40, 41, 42, 43, 44, 60, 61, 40, 41]
PENALISED = SamplingParams(
    temp=0.9, seed=4, top_p=0.95, top_k=50, repetition_penalty=1.3, repetition_context_size=6, presence_penalty=0.4,
    rule="residual",
)  # fmt: skip


def test_p_at_each_position_counts_the_chain_in_its_history(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chain = loaded("llama"), [50, 41, 50, 7]
    seen: list[np.ndarray] = []

    def capture(self: ResidualSampler, log_p: np.ndarray, *rest: object) -> int:
        seen.append(log_p)
        return 0

    monkeypatch.setattr(ResidualSampler, "accepted", capture)
    verify(open_slots(model, [PROMPT], [PENALISED])[0], chain, one_hot(chain))
    for place in range(len(chain)):
        text = [*PROMPT, *chain[:place]]
        alone = filtered_logprobs(model.model(mx.array([text]))[0, -1:], [text], PENALISED)
        assert np.allclose(np.exp(seen[0][place]), np.array(mx.softmax(alone[0])), atol=1e-5)


def test_plain_steps_bonus_tokens_and_running_ahead_draw_the_same(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded("llama")
    steps = open_slots(model, [PROMPT], [PENALISED])
    text = [verify(steps[0]).bonus for _ in range(24)]
    assert decode_pipelined(open_slots(model, [PROMPT], [PENALISED])[0], 24) == text
    rounds = open_slots(model, [PROMPT], [PENALISED])
    sampler = rounds[0].sampler
    assert isinstance(sampler, ResidualSampler)
    sampler.accepted = lambda log_p, positions, chain, q: len(chain)  # type: ignore[method-assign]
    for done in range(0, 24, 3):
        output = verify(rounds[0], text[done : done + 2], one_hot(text[done : done + 2]))
        assert (output.accepted, output.bonus) == (2, text[done + 2])


def test_residual_chains_at_temperature_0_are_verified_by_equality(loaded: Callable[..., LoadedModel]) -> None:
    model, greedy = loaded("llama"), SamplingParams(rule="residual")
    slots = open_slots(model, [PROMPT], [greedy])
    text = [verify(slots[0]).bonus for _ in range(4)]
    for q in (None, one_hot(text[:3])):
        assert verify(open_slots(model, [PROMPT], [greedy])[0], text[:3], q).bonus == text[3]


def test_only_a_residual_request_takes_a_q(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded("llama")
    drawn = [verify(open_slots(model, [PROMPT], [PENALISED])[0], [1, 2], q) for q in (None, one_hot([1, 2]))]
    assert drawn[0] == drawn[1]  # without a q tokens count as chosen with certainty
    coupled = SamplingParams(temp=1.0, seed=1)
    with pytest.raises(InvalidRequest, match="has a q; expected one without q"):
        verify(open_slots(model, [PROMPT], [coupled])[0], [1, 2], one_hot([1, 2]))
