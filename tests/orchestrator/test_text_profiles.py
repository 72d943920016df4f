"""A text's rounds determine its kind, whatever its prompt looked like; estimates of that kind are used."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from outrider.orchestrator.core.policy.acceptance import (
    CODE_TEXT,
    CONSTRAINED_TEXT,
    GENERAL_TEXT,
    REPEATING_TEXT,
    TextProfiles,
)
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.protocol.messages import InProcessDrafter
from tests.harness.auto_simulation import ACCEPTANCE, best_rate, cold_start_rates, run_auto

DEPTH = 4
GOOD_IN = {"eagle3": CODE_TEXT, "mtp": GENERAL_TEXT}


def chain(rng: random.Random, chance: float) -> int:
    return next((place for place in range(DEPTH) if rng.random() >= chance), DEPTH)


def trained_profiles() -> TextProfiles:
    """Returns profiles that have learned that one head does well in code and the other in prose."""
    estimates, rng = Estimates(), random.Random(1)
    estimates.add_drafters([InProcessDrafter(name) for name in GOOD_IN])
    texts = TextProfiles(estimates)
    for name, home in GOOD_IN.items():
        for kind in (CODE_TEXT, GENERAL_TEXT):
            acceptance = texts.of_kind(kind, greedy=True)
            for _ in range(100):
                accepted = chain(rng, 0.85 if kind == home else 0.35)
                acceptance.observe(name, DEPTH, accepted)
                estimates.in_process[name].observe(DEPTH, accepted, 1.0)
    return texts


@pytest.mark.parametrize("name", GOOD_IN)
def test_rounds_determine_the_kind_of_a_text(name: str) -> None:
    texts, rng = trained_profiles(), random.Random(2)
    for initial_kind in (CODE_TEXT, GENERAL_TEXT):
        text = texts.open(initial_kind, greedy=True)
        for _ in range(10):
            texts.observe(text, name, DEPTH, chain(rng, 0.85))
        assert text.kind == GOOD_IN[name]


def test_kind_is_kept_after_one_rejection_and_always_with_a_grammar() -> None:
    texts = trained_profiles()
    text = texts.open(CODE_TEXT, greedy=True)
    texts.observe(text, "eagle3", 1, 0)
    assert text.kind == CODE_TEXT
    accepted = texts.open(CONSTRAINED_TEXT, greedy=True)
    for _ in range(20):
        texts.observe(accepted, "eagle3", DEPTH, DEPTH)
    assert accepted.kind == CONSTRAINED_TEXT


def test_unseen_kind_uses_general_rates_until_observed() -> None:
    estimates = Estimates()
    texts = TextProfiles(estimates)
    for _ in range(200):
        estimates.observe_chain(DEPTH, 0)
    fresh = texts.of_kind(REPEATING_TEXT, greedy=False)
    assert fresh.acceptance_of().rate(0) == pytest.approx(estimates.acceptance_of().rate(0))
    for _ in range(20):
        fresh.observe("", DEPTH, DEPTH)
    assert (
        fresh.acceptance_of().rate(0) > 0.6 > 0.1 > texts.of_kind(REPEATING_TEXT, greedy=True).acceptance_of().rate(0)
    )


def test_first_rejections_are_not_counted_at_every_level() -> None:
    """A server's first text is all that is known of the text, its kind and all texts, but it must not count thrice."""
    estimates = Estimates()
    estimates.add_drafters([InProcessDrafter("draft", agreement=0.6)])
    texts = TextProfiles(estimates)
    text = texts.open(GENERAL_TEXT, greedy=True)
    for _ in range(7):
        estimates.in_process["draft"].observe(1, 0, 1.0)
        texts.observe(text, "draft", 1, 0)
    assert 0.2 < text.acceptance.acceptance_of("draft").rate(0) < 0.5
    for _ in range(60):
        estimates.in_process["draft"].observe(1, 0, 1.0)
        texts.observe(text, "draft", 1, 0)
    assert text.acceptance.acceptance_of("draft").rate(0) < 0.2


def test_kind_without_observations_is_not_assigned() -> None:
    texts = trained_profiles()
    text = texts.open(CODE_TEXT, greedy=True)
    for _ in range(20):
        texts.observe(text, "mtp", DEPTH, 2)
    assert text.kind != REPEATING_TEXT


@pytest.mark.parametrize(("agreement", "accepted"), [(0.0, DEPTH), (1.0, 0), (1.0, DEPTH), (0.0, 0)])
def test_rates_of_zero_and_one_accept_contrary_observations(agreement: float, accepted: int) -> None:
    estimates = Estimates()
    estimates.add_drafters([InProcessDrafter("mtp", agreement=agreement)])
    texts = TextProfiles(estimates)
    text = texts.open(CODE_TEXT, greedy=True)
    for _ in range(40):
        texts.observe(text, "mtp", DEPTH, accepted)
    again = texts.open(GENERAL_TEXT, greedy=True)
    texts.observe(again, "mtp", DEPTH, accepted)
    assert 0 <= again.acceptance.acceptance_of("mtp").rate(0) <= 1


def test_text_starts_with_the_rates_of_its_kind_and_learns_its_own() -> None:
    errors = []
    for seed in range(8):
        texts, rng = trained_profiles(), random.Random(seed)
        text = texts.open(CODE_TEXT, greedy=True)
        kind = texts.of_kind(CODE_TEXT, greedy=True).acceptance_of("mtp").rate(0)
        assert text.acceptance.acceptance_of("mtp").rate(0) == pytest.approx(1 - POLICY.optimism * (1 - kind))
        counts = [chain(rng, 0.6) for _ in range(20)]
        for accepted in counts:
            texts.observe(text, "mtp", DEPTH, accepted)
        share = sum(counts) / sum(min(accepted + 1, DEPTH) for accepted in counts)
        errors.append(abs(text.acceptance.acceptance_of("mtp").rate(0) - share))
    assert fmean(errors) < 0.12


def test_auto_is_near_the_best_of_each_kind_with_misleading_prompts() -> None:
    found = run_auto(1, 40, 256, error_rate=0.2)
    assert fmean(found[kind] / best_rate(kind) for kind in ("code", "prose")) > 0.95


def test_first_tokens_shift_the_rates_of_all_positions() -> None:
    """What is observed at the first position also shifts the rates of later ones, and each keeps its own odds."""
    texts = trained_profiles()
    kind = texts.of_kind(CODE_TEXT, greedy=True)
    text = texts.open(CODE_TEXT, greedy=True)
    for _ in range(12):
        texts.observe(text, "eagle3", 1, 1)
    own_rates, kind_rates = text.acceptance.acceptance_of("eagle3"), kind.acceptance_of("eagle3")
    assert all(kind_rates.rate(place) < own_rates.rate(place) <= 1.0 for place in range(DEPTH))
    for _ in range(60):
        texts.observe(text, "eagle3", DEPTH, 0)
    assert all(0.0 <= own_rates.rate(place) < kind_rates.rate(place) for place in range(DEPTH))


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9)])
def test_long_text_that_becomes_harder_or_easier_is_followed(before: float, after: float) -> None:
    texts, rng = trained_profiles(), random.Random(4)
    text = texts.open(GENERAL_TEXT, greedy=True)
    for chance, rounds in ((before, 1000), (after, 200)):
        for _ in range(rounds):
            texts.observe(text, "eagle3", DEPTH, chain(rng, chance))
        assert text.acceptance.acceptance_of("eagle3").rate(0) == pytest.approx(chance, abs=0.25)


def test_a_cold_server_loses_little_in_its_first_requests() -> None:
    """The simulation is deterministic. It gave 0.77 and 0.87 when the rates of a few rounds were trusted."""
    best = {kind: best_rate(kind) for kind in ACCEPTANCE}
    found = [cold_start_rates(seed, best) for seed in range(3)]
    assert fmean(first for first, _ in found) > 0.83
    assert fmean(last for _, last in found) > 0.88
