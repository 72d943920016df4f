"""A paced drafter proposes what the drafter inside it proposes, at the times of the profile's machine."""

from __future__ import annotations

from outrider.protocol.sampling import SamplingParams
from tools.latency import Latency
from tools.simulation.pace import Pace
from tools.simulation.profile import Profile
from tools.simulation.replay import PacedDrafter, ReplayDrafter, Script

TEXT = tuple(range(1, 60))
PROFILE = Profile("m", ("s",), Latency(((1, 10.0),)), Latency(((1, 2.0), (3, 4.0))), 0.0, (0.5,), (0.25, 0.25))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_forward_takes_its_time_once_its_result_is_read():
    clock = Clock()
    inner = ReplayDrafter(Script((TEXT,), (1.0,), (), 64))
    paced = PacedDrafter(inner, PROFILE.name, Pace(PROFILE.draft, clock.sleep, clock), clock)
    tree = paced.open(TEXT[:4], SamplingParams())
    nodes = tree.feed([tree.root] * 3, [5, 6, 7])
    assert clock.now == 0.0, "feeding is lazy"
    assert tree.best(nodes)[0] == 6
    assert round(clock.now, 6) == 0.004
    for _ in range(2):
        nodes = tree.feed(nodes[:1], [None])
    tree.best(nodes)
    assert round(clock.now, 6) == 0.008
    tree.candidates(nodes, 3)
    assert round(clock.now, 6) == 0.008, "a forward is not computed twice"


def test_replay_errs_at_the_rate_of_the_profile():
    script = Script((TEXT,), (1.0,), (), 64)
    drafter = ReplayDrafter(script).with_errors_of(PROFILE)
    tree = drafter.open(TEXT[:4], SamplingParams())
    right = 0
    for token in TEXT[4:]:
        right += tree.best([tree.root]) == [token]
        tree.commit(tree.feed([tree.root], [token]))
    assert 10 < right < 45
