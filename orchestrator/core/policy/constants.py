"""The constants of the policy of `auto`: everything in it that is tuned rather than derived.

The comment of each says what it does, and what another value costs: the change of the mean over the scenes of
`python -m tools.policy_constants`, in hundredths of the best fixed arms' rate (error 0.4). Where no scene shows what a
constant protects from, the test that does is named. What was tried and left out is in docs/log/2026-11.md, "What each
constant of `auto` is worth".
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.ngrams import COPY_FADE, COPY_PRIOR_CHAINS, PRIOR_COPIED


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """Fields count rounds, samples or chains, or are times in milliseconds; all others are shares and factors."""

    # Averages and priors. A prior must be right where nothing was measured yet, and weigh little.
    smoothing: float = 0.1  # minimum weight of a new sample in an average; at 0.05 -0.45, at 0.2 -0.2
    fade: float = 0.99  # factor on older chains and forwards with each new one; at 0.98 -0.5
    prior_chains: float = 8.0  # weight of the prior of an acceptance or a hit rate, in chains; at 4 -0.2
    prior_rate: float = 0.7  # acceptance of a token, and hit rate; acceptance at 0.5 -1.2, at 0.85 -1.0
    prior_verify_ms: float = 10.0  # a forward of one row; at 40 -0.7
    prior_depth_ms: float = 3.0  # one more token on all branches; at 1 -0.6, at 10 -1.0
    cost_per_row: float = 0.1  # each further row, in units of the first; at 0.2 -0.75, at 0 the worst scene -4.4

    # Texts and their kinds.
    prior_rejections: float = 3.0  # weight of the kind's acceptance in one text, in rejections; at 1.5 or 8 -0.3
    optimism: float = 0.75  # a text begins with this share of its kind's rejections; at 0.5 -0.6, at 1 the worst -10
    max_repeat_tokens: int = 512  # newest tokens of a prompt checked for repetition; all: -0.2, the worst -7
    min_repeat_pairs: int = 24  # fewer pairs of tokens show nothing (test_drafters.py)
    repeated_share: float = 0.3  # share of pairs that repeat in a repeating text (test_drafters.py)

    # Copies from the text.
    prior_copied: float = PRIOR_COPIED  # acceptance of a token; at 0.3 -0.5, at 0.7 -0.5
    prior_alternative: float = 0.1  # acceptance where a drafter contradicts the copy; at 0.7 -0.5
    copy_prior_chains: float = COPY_PRIOR_CHAINS  # weight of both, in copies; at 8 -0.4
    copy_fade: float = COPY_FADE  # as `fade`: texts that stop repeating are soon noticed (test_copies.py); at 0.99 -0.1

    # When a request stops using an in-process drafter (test_drafters.py).
    max_silent_rounds: int = 4  # rounds in a row without a proposed token

    # Several draft workers (test_drafter_latency.py, test_draft_pool.py).
    latency_smoothing: float = 0.3  # as `smoothing`, for their latencies
    drafter_trial_rounds: int = 32  # a worker that is left out is tried again after so many rounds

    # K and B.
    near: float = 0.93  # the widest B that reaches this share of the best rate is chosen; at 1 -0.2
    breadth_interval_rounds: int = 8  # between two forecasts of an open B in SSD, which take 0.1 ms

    # Records of arms.
    episode_rounds: int = 12  # rounds under one plan; at 8 -0.7, at 24 -0.5
    min_episode_rounds: int = 4  # before the first choice, and in a trial; at 2 -2.9, at 8 -0.9
    min_known_rounds: int = 36  # rounds of an arm, or of a kind of text, that are enough to know it; at 0 -0.6
    episode_fade: float = 0.9  # factor on older measurements with each episode; at 0.7 -2.0, at 1 -0.5
    prior_weight_ms: float = 250.0  # weight of a forecast or tuned rate; at 500 -1.3, at 1000 -2.3, at 0 -0.35
    max_stall_factor: float = 2.0  # a round or cost counts as at most so many average ones (test_policy.py: one stall)

    # Changes and trials.
    # With many requests prompts are read more slowly beside chains, and texts end one by one, the last in few rows.
    gain_per_doubling: float = 1.025  # factor over AR per doubling of the requests beyond two (test_concurrency.py)
    stay_margin: float = 1.02  # another arm must be better by this factor; at 1 -0.9
    patience: int = 24  # episodes until an arm is tried again; 48 or never: -0.3
    promising: float = 0.9  # an estimate of this share of the best is tried after `patience`; any: -0.8 in crowds
    unlikely: int = 2  # times `patience` for the others (test_drafters.py); at 1 -0.2
    max_wait_factor: int = 32  # maximum factor on `patience`, doubled by each trial; no doubling: -0.6 over longer runs
    error_half_life_episodes: float = 24  # after so many the formula's error in a crowd is halved (test_policy.py)


POLICY = PolicyConstants()
