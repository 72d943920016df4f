"""N-gram copies extend or replace chains if that pays, by the measured acceptance and cost of rows."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import repeat

import pytest

from outrider.orchestrator.core.policy.acceptance import Average
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecasts
from outrider.orchestrator.core.proposal import (
    CopyRound,
    Lookup,
    Proposal,
    best_tail,
    extend_by_copy,
    longest_copy,
    propose_copy,
)
from outrider.protocol.heads import NGRAM
from outrider.protocol.ngrams import MAX_COPY_TOKENS, Copy, NgramIndex
from outrider.protocol.schema import Origin

LOOP = (1, 2, 3, 4, 5, 6, 7)
COPY = Copy((1, 2, 3, 4, 5, 6), 5)
LONG = Copy(tuple(range(1, 13)), 5)


def estimates(row_ms: float = 0.5, holds: bool = True, drafted: int = 3) -> Estimates:
    """Returns estimates of a target whose plain step takes 10 ms.

    Copies with five matching tokens are always accepted if `holds`, else never. Of chains of 3, `drafted` tokens are
    accepted.
    """
    found = Estimates()
    for _ in range(200):
        for rows in range(1, 14):
            found.observe_verify(rows, 10.0 + row_ms * (rows - 1))
        found.copied.add(LONG, LONG.chain if holds else (0,))
        found.observe_chain(3, drafted)
        found.observe_round(2, 10.0)
    return found


def test_copies_are_used_fully_if_accepted_and_not_otherwise() -> None:
    assert best_tail(estimates(), COPY).tokens == COPY.chain
    assert best_tail(estimates(holds=False), COPY).tokens == ()


def test_costly_rows_shorten_a_copy() -> None:
    lengths = [len(best_tail(estimates(row_ms), COPY).tokens) for row_ms in (0.5, 4.6, 9.0)]
    assert lengths[0] == 6 and lengths == sorted(lengths, reverse=True) and lengths[2] < 6


def test_copy_after_uncertain_tokens_has_less_gain() -> None:
    sure, unsure = best_tail(estimates(), COPY), best_tail(estimates(), COPY, held=0.1)
    assert 0 <= unsure.gain < sure.gain


@pytest.mark.parametrize("rows", [(4,), (3, 4, 5), (1, 4)])
def test_row_cost_is_learned_from_differing_row_counts(rows: tuple[int, ...]) -> None:
    found = Estimates()
    for number in range(300):
        for count in rows:
            found.observe_verify(count, 10.0 + 5.0 * (number % 7) + (count - 1) * 2.0)
    expected_ms = 2.0 if len(rows) > 1 else 0.1 * found.verify_ms(1)
    assert found.row_cost() == pytest.approx(expected_ms * found.tokens_per_ms(), rel=0.1)


def test_pieces_of_prompts_hardly_raise_the_row_cost() -> None:
    """A forward with a piece takes half as long again as a usual one at most, since the target chooses its size."""
    found = Estimates()
    for rows, milliseconds in [(1, 10.0), (2, 11.0), (4, 13.0)] * 10:
        found.observe_verify(rows, milliseconds)
    before = found.row_cost()
    for rows in (9, 8, 10, 9):
        found.observe_verify(rows, 13.0 + (rows - 4) * 1.3)
    assert before <= found.row_cost() < 1.2 * before


def test_a_stalled_forward_hardly_changes_the_cost_of_a_row_count() -> None:
    found = Estimates()
    for milliseconds in (*[10.0] * 20, 200.0):
        found.observe_verify(2, milliseconds)
    assert found.forward_ms(2) < 11.5


def test_a_stalled_round_hardly_changes_the_worth_of_time() -> None:
    """A round may stall because the server was suspended. Rounds that are longer because of a new load count fully."""
    found = estimates()
    worth = found.tokens_per_ms()
    found.observe_round(2, 60_000.0)
    assert found.tokens_per_ms() > worth / 1.5
    for _ in range(40):
        found.observe_round(2, 30.0)
    assert found.tokens_per_ms() == pytest.approx(worth / 3, rel=0.1)


def test_forwards_beside_drafters_and_on_all_cores_have_their_own_costs() -> None:
    found = Estimates()
    found.observe_verify(2, 14.0)
    assert found.forward_ms(2, all_cores=True) == found.forward_ms(2) == 14.0
    found.observe_verify(2, 10.0, all_cores=True)
    assert (found.forward_ms(2, all_cores=True), found.forward_ms(2)) == (10.0, 14.0)
    forecasts = Forecasts(found, found, 1, 1, 1, False)
    copying, drafting = forecasts.forecast(Arm("sd", drafter=NGRAM))[1], forecasts.forecast(Arm("ssd"))[1]
    assert copying > 1 / 10.0 > 1 / 14.0 > drafting / 2


def test_copies_that_stop_holding_are_soon_shortened() -> None:
    """As when a greedy text that repeats itself is followed by a sampled text that does not."""
    found = estimates()
    for _ in range(300):
        found.copied.add(LONG, LONG.chain)
    assert len(best_tail(found, Copy((1,) * 12, 5)).tokens) == 12
    for _ in range(20):
        found.copied.add(LONG, (LONG.chain[0], 0))
    assert len(best_tail(found, Copy((1,) * 12, 5)).tokens) <= 4


# --- filling a branch ---------------------------------------------------------------------------------------------


def branch(*chain: int) -> Proposal:
    return Proposal(chain, Origin.PREPARED, Lookup.HIT, by=(Origin.PREPARED,) * len(chain))


def test_branch_in_a_repeating_text_is_extended_by_a_copy() -> None:
    ngrams = NgramIndex((*LOOP, *LOOP, 1))
    found = extend_by_copy(estimates(), ngrams, branch(3, 4, 5), committed=(2,), max_chain_tokens=50)
    assert found.chain[:6] == (3, 4, 5, 6, 7, 1) and 6 <= len(found.chain) <= MAX_COPY_TOKENS
    copied = len(found.chain) - (3 if found.source is Origin.PREPARED else 0)
    assert found.lookup is Lookup.HIT and found.by.count(Origin.COPIED) == copied


def test_copy_replaces_a_branch_only_if_better() -> None:
    ngrams = NgramIndex((*LOOP, *LOOP, 1))
    other = branch(9, 9, 9)
    taken = extend_by_copy(estimates(drafted=0), ngrams, other, committed=(2,), max_chain_tokens=50)
    assert taken.source is Origin.COPIED and taken.lookup is Lookup.HIT and taken.chain[:3] == (3, 4, 5)
    kept = extend_by_copy(estimates(holds=False), ngrams, other, committed=(2,), max_chain_tokens=50)
    assert kept == other


def test_branch_is_unchanged_without_an_ngram_match() -> None:
    assert extend_by_copy(
        estimates(drafted=0), NgramIndex((1, 2, 3)), branch(7, 8), committed=(9,), max_chain_tokens=50
    ) == branch(7, 8)


def test_branch_ends_before_its_first_unlikely_token() -> None:
    drafted = extend_by_copy(
        estimates(), NgramIndex(), branch(7, 8, 9), committed=(), max_chain_tokens=50, odds=(0.9, 0.02, 0.9)
    )
    assert drafted.chain == (7,) and drafted.offered == () and drafted.source is Origin.PREPARED
    nothing = extend_by_copy(
        estimates(), NgramIndex(), branch(7, 8, 9), committed=(), max_chain_tokens=50, odds=(0.01, 0.9, 0.9)
    )
    assert nothing.chain == () and nothing.source is Origin.TARGET and nothing.lookup is Lookup.HIT
    sure = branch(7, 8, 9)
    assert (
        extend_by_copy(estimates(), NgramIndex(), sure, committed=(), max_chain_tokens=50, odds=(0.9, 0.9, 0.9)) == sure
    )


def test_copy_continues_a_branch_where_the_drafter_is_unsure() -> None:
    """The text repeats itself. The drafter is sure of the next token, but not that the repetition continues."""
    ngrams = NgramIndex((*LOOP, *LOOP, 1))
    found = extend_by_copy(
        estimates(), ngrams, branch(3, 99, 98), committed=(2,), max_chain_tokens=50, odds=(0.95, 0.1, 0.1)
    )
    assert found.chain[:5] == (3, 4, 5, 6, 7) and 99 not in found.chain


def test_tokens_that_were_left_out_count_as_rejected_and_take_no_rows() -> None:
    found = Estimates()
    for _ in range(400):
        found.observe_chain(4, 1, verified=1)
    assert found.rows(4) == pytest.approx(2.0, abs=0.3)
    assert found.drafted.expected_tokens(4) == pytest.approx(2.0, abs=0.3)
    whole = Estimates()
    for _ in range(400):
        whole.observe_chain(4, 1)
    assert whole.rows(4) == pytest.approx(5.0)


@pytest.mark.parametrize("max_chain_tokens", [0, 1, 3, 4])
def test_chains_fit_the_remaining_room(max_chain_tokens: int) -> None:
    ngrams = NgramIndex(LOOP * 3)
    assert (
        len(
            extend_by_copy(
                estimates(),
                ngrams,
                branch(*LOOP[: min(max_chain_tokens, 3)]),
                committed=(),
                max_chain_tokens=max_chain_tokens,
            ).chain
        )
        <= max_chain_tokens
    )
    assert len(longest_copy(ngrams, max_chain_tokens).chain) == max_chain_tokens


def test_no_worthwhile_copy_gives_a_plain_step() -> None:
    assert propose_copy(best_tail(estimates(holds=False), COPY).tokens).source is Origin.TARGET


# --- the first rounds ---------------------------------------------------------------------------------------------


def test_few_slow_first_forwards_do_not_inflate_the_row_cost() -> None:
    """One of eight forwards was disturbed. The prior of the row cost must outweigh it."""
    found = Estimates()
    for rows, milliseconds in ((5, 22.0), (5, 23.0), (3, 21.0), (6, 45.0), (5, 22.0), (5, 23.0), (4, 22.0), (5, 22.0)):
        found.observe_verify(rows, milliseconds)
    assert found.row_cost() < 0.2 * found.verify_cost(0)


def test_slow_first_sample_soon_loses_weight() -> None:
    average = Average()
    for value in (20.0, 2.0, 2.0, 2.0):
        average.add(value)
    assert average() == pytest.approx(6.5)
    for _ in range(40):
        average.add(4.0)
    assert average() == pytest.approx(4.0, abs=0.1)


def test_one_missed_lookup_only_lowers_the_hit_rate() -> None:
    found = Estimates()
    found.observe_lookup(False, 16)
    assert 0.5 < found.hit_rate() < 0.8 and found.hit_rate_of(16) > 0.5


def test_copy_acceptance_is_learned_without_verifying() -> None:
    found = Estimates()
    before = found.copied.rate(5, 0)
    for _ in range(10):
        found.copied.add(LONG, LONG.chain[:3])
    assert found.copied.rate(5, 0) > 0.85 > before and found.copied.rate(5, 1) > 0.85
    for _ in range(10):
        found.copied.add(LONG, (0, 1, 2))
    assert found.copied.rate(5, 0) < 0.6


@pytest.mark.parametrize("row_ms", [0.5, 3.0])
def test_plain_decoding_observes_the_rounds_of_ngrams_alone(row_ms: float) -> None:
    """A target that decodes plainly observes the same copy rounds, with the same rows and right tokens, as one that
    verifies the copies."""
    found, draws = estimates(row_ms), random.Random(5)
    words = [[draws.randrange(50) for _ in range(draws.randrange(2, 9))] for _ in range(12)]
    text = [token for _ in range(80) for token in draws.choice(words)]

    def begin(base_len: int) -> CopyRound:
        copy = longest_copy(NgramIndex(text[:base_len]), MAX_COPY_TOKENS)
        return CopyRound(base_len, copy, len(best_tail(found, copy).tokens))

    def rounds(steps: Iterable[int]) -> list[tuple[int, int]]:
        """Returns the rows and right tokens of the copy rounds of a target that commits `steps` tokens at a time."""
        round_, observed, at = begin(20), [], 20
        for step in steps:
            at += step
            right = round_.right(text[round_.base_len : at]) if at <= len(text) else None
            if right is not None:
                observed.append((round_.rows, right))
                round_ = begin(at)
        return observed

    plain = rounds(repeat(1, len(text)))
    verified = rounds(right + 1 for _, right in plain)
    assert plain == verified and any(0 < right < rows for rows, right in plain)


def test_empty_copy_leaves_estimates_unchanged() -> None:
    found, fresh = Estimates(), Estimates()
    found.copied.add(Copy(), (1, 2, 3))
    assert [found.copied.rate(n, 0) for n in range(6)] == [fresh.copied.rate(n, 0) for n in range(6)]
