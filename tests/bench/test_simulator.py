"""The simulator agrees with the formula where the formula is exact, and with the real rounds in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from outrider.orchestrator.core.policy.constants import POLICY
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Message, Verify
from outrider.protocol.sampling import SamplingParams
from tests.bench.virtual_time import PROMPT_TOKENS, VOCAB, VirtualCluster, random_texts
from tools.latency import Latency
from tools.simulation.odds import UNRANKED, TextDraws
from tools.simulation.profile import PROFILES, Profile
from tools.simulation.replay import ReplayDrafter, Script
from tools.simulation.simulator import Policy, Simulator

VERIFY_MS, STEP_MS = 10.0, 1.0
MACHINE = Profile(
    "round numbers", ("none",), Latency(((1, VERIFY_MS),)), Latency(((1, STEP_MS),)), 0.0, (0.8,), (0.6, 0.2, 0.1)
)
SURE = replace(MACHINE, acceptance=(1.0,))
TOKENS = 2000


def rate(profile: Profile, policy: Policy, batch: int = 1, hop_ms: float = 0.0) -> float:
    return Simulator(profile, policy, batch, hop_ms).run(TOKENS).tokens_per_second


def test_plain_decoding_takes_one_forward_per_token() -> None:
    assert rate(MACHINE, Policy("ar")) == pytest.approx(1000 / VERIFY_MS)
    assert rate(MACHINE, Policy("ar"), batch=4) == pytest.approx(4000 / VERIFY_MS)


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_sd_round_takes_its_draft_steps_and_one_verify(depth: int) -> None:
    round_ms = VERIFY_MS + depth * STEP_MS
    assert rate(SURE, Policy("sd", depth)) == pytest.approx(1000 * (depth + 1) / round_ms, rel=0.01)


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_ssd_over_sd_is_one_plus_t_sd_with_sure_hits_and_hidden_drafting(depth: int) -> None:
    ahead, in_turn = rate(SURE, Policy("ssd", depth, 8)), rate(SURE, Policy("sd", depth))
    assert ahead / in_turn == pytest.approx(1 + depth * STEP_MS / VERIFY_MS, rel=0.01)


def test_round_time_is_that_of_a_tree_longer_than_the_verify() -> None:
    """With full depth, a round waits for the whole tree, which takes K + 1 forwards."""
    slow = replace(SURE, draft=Latency(((1, 3.0),)))
    assert rate(slow, Policy("ssd", 4, 8, anytime=False)) == pytest.approx(1000 * 5 / 15.0, rel=0.01)


@pytest.mark.parametrize("anytime", [True, False])
def test_ssd_without_hits_is_as_fast_as_sd(anytime: bool) -> None:
    """The third token is never accepted and bonus tokens are never among the candidates."""
    hopeless = replace(MACHINE, acceptance=(0.8, 0.8, 0.0), bonus_ranks=())
    ahead = Simulator(hopeless, Policy("ssd", 3, 8, anytime=anytime, adaptive_fallback=False)).run(TOKENS)
    assert ahead.hit_rate == 0
    assert ahead.tokens_per_second == pytest.approx(rate(hopeless, Policy("sd", 3)), rel=0.01)


def test_link_latency_costs_ssd_nothing_and_sd_a_round_trip() -> None:
    far = replace(SURE, link_ms=2.0)
    assert rate(far, Policy("ssd", 4, 8)) == pytest.approx(rate(SURE, Policy("ssd", 4, 8)), rel=0.01)
    assert rate(far, Policy("sd", 4)) == pytest.approx(1000 * 5 / (VERIFY_MS + 4 * STEP_MS + 4.0), rel=0.01)


def test_message_hops_cost_ssd_and_sd_time() -> None:
    assert rate(SURE, Policy("ssd", 4, 8), hop_ms=0.5) == pytest.approx(1000 * 5 / 11.0, rel=0.01)
    assert rate(SURE, Policy("sd", 4), hop_ms=0.5) == pytest.approx(1000 * 5 / 16.0, rel=0.01)


def test_gain_of_ssd_shrinks_as_the_batch_grows() -> None:
    policy = Policy("ssd", 4, 8, adaptive_fallback=False)
    gains = [rate(MACHINE, policy, batch) / rate(MACHINE, Policy("sd", 4), batch) for batch in (1, 4, 16)]
    assert gains[0] > gains[1] > gains[2]


def test_more_branches_raise_the_hit_rate() -> None:
    hits = [Simulator(MACHINE, Policy("ssd", 3, branches)).run(TOKENS).hit_rate for branches in (2, 4, 8, 16)]
    assert hits == sorted(hits) and hits[-1] > 0.9 > 0.6 > hits[0]


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_no_extension_of_the_papers_policy_costs_speed(profile: Path) -> None:
    machine = Profile.read(profile)
    paper = Policy("ssd", 3, 12, "geometric", anytime=False, adaptive_fallback=False, branch_waits=False)
    rates = [rate(machine, paper)]
    for more in (
        {"fan_out": "best-first"},
        {"adaptive_fallback": True},
        {"anytime": True},
        {"branch_waits": True},
    ):
        paper = replace(paper, **more)  # type: ignore[arg-type]
        rates.append(rate(machine, paper))
    assert all(after > 0.99 * before for before, after in pairwise(rates)), rates


def test_branches_for_full_acceptance_arrive_with_the_second_forward() -> None:
    """Here that is just after the verify. Without waiting, every outcome of a drafter that is always right misses."""
    late = replace(SURE, draft=Latency(((1, 6.0),)))
    policy = Policy("ssd", 1, 4, adaptive_fallback=False, branch_waits=False)
    assert Simulator(late, policy).run(TOKENS).hit_rate < 0.01


def test_an_outcome_waits_for_branches_on_their_way() -> None:
    """The second forward, with the branches for full acceptance, ends just after the verify."""
    late = replace(MACHINE, draft=Latency(((1, 4.9),)), link_ms=0.2)
    policy = Policy("ssd", 2, 8)
    assert rate(late, policy) > 1.1 * rate(late, replace(policy, branch_waits=False))


# --- against the real rounds ------------------------------------------------------------------------------------------

FAR = replace(Profile.read(PROFILES / "h100-llama-70b.json"), link_ms=2.0)
SLOW = replace(MACHINE, draft=Latency(((1, 4.5), (8, 5.0))), link_ms=0.4)
CASES = [
    (Profile.read(PROFILES / "h100-llama-70b.json"), Policy("ar")),
    (Profile.read(PROFILES / "h100-llama-70b.json"), Policy("sd", 6)),
    (Profile.read(PROFILES / "h100-llama-70b.json"), Policy("ssd", 7, 24, "geometric", anytime=False)),
    (Profile.read(PROFILES / "h100-llama-70b.json"), Policy("ssd", 9, 24)),
    (Profile.read(PROFILES / "mac-ane-gpu.json"), Policy("ssd", 3, 16)),
    (FAR, Policy("ssd", 6, 16, "uniform")),
    (FAR, Policy("sd", 6)),
    (SLOW, Policy("ssd", 2, 8)),
]


def draws_of(script: Script, text: tuple[int, ...]) -> TextDraws:
    """The replay drafter's outcomes for `text`."""
    tree = ReplayDrafter(script).open(text[:PROMPT_TOKENS], SamplingParams())
    draws, ranks = [], []
    for token in text[PROMPT_TOKENS:]:
        found = [candidate.token for candidate in tree.candidates([tree.root], 40)[0]]
        draws.append(0.0 if found[0] == token else 1.0)
        ranks.append(found.index(token) - 1 if token in found[1:] else UNRANKED)
        tree.commit(tree.feed([tree.root], [token]))
    return TextDraws(tuple(draws), tuple(ranks))


@pytest.mark.parametrize(("profile", "policy"), CASES, ids=lambda case: getattr(case, "name", str(case))[:60])
def test_simulator_agrees_with_the_real_rounds(profile: Profile, policy: Policy) -> None:
    """Both have the same outcomes, because position and token determine whether a proposal is right.

    Real rounds may use fewer branches where that costs no speed, and then have slightly fewer hits.
    """
    tokens = 500
    texts = random_texts(2, tokens + 60)
    cluster = VirtualCluster(
        profile, texts, depth=policy.depth, branches=policy.branches, fan_out=policy.fan_out,
        full_depth=not policy.anytime,
    )  # fmt: skip
    cluster.run(texts[0], 200, policy.mode)
    timings = cluster.run(texts[1], tokens, policy.mode)
    script = Script(texts, profile.acceptance, profile.bonus_ranks, VOCAB)
    found = Simulator(profile, policy).play([draws_of(script, texts[1])])
    assert found.tokens_per_second == pytest.approx(timings.predicted_per_second, rel=0.03)
    lookups = timings.cache_hits + timings.cache_misses
    assert found.hit_rate == pytest.approx(timings.cache_hits / lookups if lookups else 0.0, abs=0.08)


def test_runs_in_virtual_time_repeat_exactly() -> None:
    texts = random_texts(1, 300)
    runs = [VirtualCluster(MACHINE, texts, depth=3, branches=8).run(texts[0], 200, "auto") for _ in range(2)]
    assert runs[0] == runs[1]


def test_auto_tries_plain_decoding_only_briefly_when_speculation_wins() -> None:
    cluster = VirtualCluster(SURE, random_texts(3, 1200), depth=4, branches=8)
    starts, lengths, send_target = [], [], cluster.send_target

    def record_plain_rounds(message: Message) -> None:
        if isinstance(message, Verify) and message.autonomous:
            starts.append(message.round)
        elif isinstance(message, Verify) and starts:
            lengths.append(message.round - starts.pop())
        send_target(message)

    cluster.send_target = record_plain_rounds  # type: ignore[method-assign]
    for text in random_texts(3, 1200):
        cluster.run(text, 1000, "auto")
    assert lengths and max(lengths) < POLICY.episode_rounds


def test_a_text_that_is_too_short_is_an_error() -> None:
    texts = random_texts(1, 60)
    with pytest.raises(InvalidRequest, match="the text has 60 tokens; expected 209"):
        VirtualCluster(MACHINE, texts, depth=3, branches=8).run(texts[0], 200, "ssd")
