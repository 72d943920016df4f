"""Rounds in arithmetic: tokens per second of a profile's machine under a policy, tens of thousands of rounds a second.

Times come from the profile's curves, luck from the draws of a text: whether the drafter's proposal at a position is
right, and if not, where the true token stands. The same text under two policies has the same luck. No process, no
message, no model; tests hold it against the real rounds in virtual time. With a batch, rounds are in step: whoever
waits makes all wait (paper, corollary 16).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul

from outrider.drafters.fan_out import POLICIES
from outrider.protocol.profile import Profile
from tools.simulation.odds import KnownOdds, Luck

# The worth of a millisecond is the rate itself: a shorter run finds it, this part of the whole.
PILOT_PART = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """How rounds are made; `mode` is ar, sd or ssd.

    `anytime`: branches serve as deep as they are; else all wait until a round's are complete. `filled`: after a miss
    the best of an AR step and a just-in-time chain of any length; else always a chain of full depth. `hoping`: an
    outcome may wait for branches that are still on their way.
    """

    mode: str = "ssd"
    depth: int = 4
    branches: int = 10
    fan_out: str = "best-first"
    anytime: bool = True
    filled: bool = True
    hoping: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run; tokens count all sequences of a batch together. `busy` is the target's share of the time."""

    tokens_per_second: float
    tokens_per_round: float
    hit_rate: float
    round_ms: float
    busy: float


@dataclass(slots=True)
class Stream:
    """One sequence. `chain` tokens are under verification at `at`; the drafter knows `fed` of them and, behind the
    whole chain, `ahead` more; it must still read `behind` committed tokens before it knows anything."""

    luck: Luck
    at: int = 0
    chain: int = 0
    fed: int = 0
    ahead: int = 0
    behind: int = 1
    accepted: int = 0
    rank: int = 0
    served: int = 0


@dataclass(slots=True)
class Work:
    """The drafter's forwards of a round: from `start`, ending at `ends`."""

    start: float
    ends: list[float] = field(default_factory=list)

    def done(self, at: float) -> int:
        """How many have ended by `at`."""
        return bisect_right(self.ends, at)

    def free(self, at: float) -> tuple[float, int]:
        """When it attends to a message that comes at `at`, and the forwards done by then: one under way is ended."""
        done = self.done(at)
        begun = self.ends[done - 1] if done else self.start
        if done == len(self.ends) or at == begun:
            return max(at, self.start), done
        return (self.start, 0) if at < begun else (self.ends[done], done + 1)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A just-in-time chain of `length` (0: an AR step) and the tokens it brings less the worth of its time."""

    length: int
    value: float


class Simulator:
    """One machine, one policy, `batch` sequences; `hop_ms` is what any message takes beyond the profile's link."""

    def __init__(self, profile: Profile, policy: Policy, batch: int = 1, hop_ms: float = 0.0) -> None:
        self._profile, self._policy, self._batch = profile, policy, batch
        self._hop, self._way = hop_ms, hop_ms + profile.link_ms
        self._odds = KnownOdds(profile)
        self._target_ms, self._draft_ms = cache(profile.target.milliseconds), cache(profile.draft.milliseconds)
        self._reach: list[float] = list(accumulate(map(self._odds.acceptance, range(policy.depth)), mul))
        self._tokens: list[float] = [1.0, *(1.0 + total for total in accumulate(self._reach))]
        self._fan_out = cache(self._fan_out_of)
        self._worth = 0.0

    def run(self, tokens: int, seed: int = 0) -> Result:
        """Texts of `tokens` tokens, drawn from `seed`."""
        return self.play([Luck.drawn(self._profile, tokens, seed + index) for index in range(self._batch)])

    def play(self, lucks: Sequence[Luck]) -> Result:
        """The same on texts whose luck is known; the run ends when a text does."""
        tokens = min(len(luck.draws) for luck in lucks) - self._policy.depth - 1
        self._worth = self._batch / self._target_ms(self._batch)
        self._worth = self._play(lucks, tokens // PILOT_PART).tokens_per_second / 1000
        return self._play(lucks, tokens)

    def _play(self, lucks: Sequence[Luck], length: int) -> Result:
        streams = [Stream(luck) for luck in lucks]
        now = free = busy = 0.0
        tokens = hits = rounds = 0
        while all(stream.at < length for stream in streams):
            rounds += 1
            verify_ms = self._verify_ms(streams)
            busy += verify_ms
            for stream in streams:
                self._verify(stream)
                tokens += stream.accepted + 1
            if self._policy.mode == "ar":
                now += verify_ms
                continue
            told = now + verify_ms + 2 * self._hop
            if self._policy.mode == "sd":
                now = self._draft(streams, told)
            else:
                now, free, found = self._look_up(streams, self._work(streams, max(now + self._way, free)), told)
                hits += found
        return Result(tokens / now * 1000, tokens / rounds, hits / (rounds * len(streams)), now / rounds, busy / now)

    # --- the target -----------------------------------------------------------------------------------------------

    def _verify_ms(self, streams: Sequence[Stream]) -> float:
        return self._target_ms(sum(1 + stream.chain for stream in streams))

    def _verify(self, stream: Stream) -> None:
        """The outcome: how much of the chain holds, and where the bonus stands among the drafter's candidates."""
        luck, accepted = stream.luck, 0
        while accepted < stream.chain and luck.draws[stream.at + accepted] < self._odds.acceptance(accepted):
            accepted += 1
        at = stream.at + accepted
        stream.accepted, stream.rank = accepted, luck.ranks[at]
        if accepted == stream.chain:
            right = luck.draws[at] < self._odds.acceptance(0)
            stream.rank = 0 if right else luck.ranks[at] + 1
        stream.at = at + 1

    # --- the drafter ----------------------------------------------------------------------------------------------

    def _draft(self, streams: Sequence[Stream], told: float) -> float:
        """SD: every sequence gets a chain of full depth. The last token of a chain that held was never fed."""
        unread = sum(2 if 0 < stream.chain == stream.accepted else 1 for stream in streams)
        for stream in streams:
            stream.chain = self._policy.depth
        chained_ms = (self._policy.depth - 1) * self._draft_ms(len(streams))
        return told + 2 * self._way + self._draft_ms(unread) + chained_ms

    def _work(self, streams: Sequence[Stream], start: float) -> Work:
        """The work ahead: branches that need the unfed end of a chain begin one forward later."""
        behind = sum(stream.behind for stream in streams)
        work = Work(start + (self._draft_ms(behind) if behind else 0.0))
        depth, now = self._policy.depth, work.start
        counts = [self._fan_out(stream.chain) for stream in streams]
        unfed = sum(stream.chain - stream.fed for stream in streams)
        early = sum(sum(count[: stream.fed + 1]) for stream, count in zip(streams, counts, strict=True))
        late = sum(map(sum, counts)) - early
        for forward in range(1, depth + 1 + bool(late)):
            rows = unfed * (forward == 1) + early * (forward <= depth) + late * (forward > 1)
            now += self._draft_ms(rows)
            work.ends.append(now)
        return work

    def _fan_out_of(self, chain: int) -> list[int]:
        return POLICIES[self._policy.fan_out]([None] * (chain + 1), self._policy.branches, self._odds)

    def _depth(self, stream: Stream, forwards: int) -> int:
        """How deep the branch of the outcome is after so many forwards; 0 if it is not there (yet)."""
        if stream.rank >= self._fan_out(stream.chain)[stream.accepted]:
            return 0
        ahead = stream.ahead if stream.accepted == stream.chain and stream.rank == 0 else 0
        grown = forwards - (stream.accepted > stream.fed)
        return min(grown + ahead, self._policy.depth) if grown > 0 else 0

    # --- between two rounds ---------------------------------------------------------------------------------------

    def _look_up(self, streams: Sequence[Stream], work: Work, told: float) -> tuple[float, float, int]:
        """When the next verify leaves, when the drafter attends to it, and how many sequences hit."""
        now = self._waited(streams, work, told)
        pushed = work.done(now - self._way)
        missed = []
        for stream in streams:
            stream.served = self._depth(stream, pushed)
            if not stream.served:
                missed.append(stream)
        free, done = work.free(now + self._way)
        length = self._after_miss(len(missed), len(streams), free - now).length if missed else 0
        if length:
            known = min(self._depth(stream, done) for stream in missed)  # what was under way for them is not lost
            free += max(length - known, 0) * self._draft_ms(len(missed))
            now = free + self._way
        for stream in streams:
            self._go_on(stream, done, length)
        return now, free, len(streams) - len(missed)

    def _waited(self, streams: Sequence[Stream], work: Work, told: float) -> float:
        """When the lookup is made: at once, or when waiting for the next forward is not worth it any more."""
        if not self._policy.anytime:
            return max(told, work.ends[-1] + self._way)
        now, pushed = told, work.done(told - self._way)
        while pushed < len(work.ends):
            arrives = work.ends[pushed] + self._way
            gain = sum(self._gain(stream, pushed, len(streams), work, now) for stream in streams)
            if gain <= self._worth * (arrives - now):
                break
            now, pushed = arrives, pushed + 1
        return now

    def _gain(self, stream: Stream, pushed: int, streams: int, work: Work, now: float) -> float:
        """The tokens, less the worth of later times, that the next push may bring a stream."""
        depth = self._depth(stream, pushed)
        if depth:
            return self._reach[depth] if depth < self._policy.depth else 0.0
        if not self._policy.hoping or pushed > (stream.accepted > stream.fed):
            return 0.0
        full = stream.accepted == stream.chain
        count = self._fan_out(stream.chain)[stream.accepted]
        prepared = sum(self._odds.bonus_share(full, rank) for rank in range(count))
        step_ms = self._draft_ms(self._policy.branches * streams)
        hit = max(self._value(1, streams, depth, (depth - 1) * step_ms) for depth in range(1, self._policy.depth + 1))
        return prepared * (hit - self._after_miss(1, streams, work.free(now + self._way)[0] - now).value)

    def _after_miss(self, missed: int, streams: int, asking_ms: float) -> Fallback:
        """The chain to ask for; of no length: an AR step while the drafter reads on."""
        step_ms, whole = self._draft_ms(missed), self._policy.depth

        def fallback(length: int) -> Fallback:
            asked_ms = asking_ms + length * step_ms + self._way if length else 0.0
            return Fallback(length, self._value(missed, streams, length, asked_ms))

        if not self._policy.filled:
            return fallback(whole)
        return max(map(fallback, range(whole + 1)), key=lambda choice: choice.value)

    def _value(self, ours: int, streams: int, length: int, wait_ms: float) -> float:
        """What `ours` of the streams bring with chains of `length`, less what the wait and the verify are worth."""
        others = (streams - ours) * (1 + self._policy.depth)
        cost = wait_ms + self._target_ms(others + ours * (1 + length))
        return ours * self._tokens[length] - self._worth * cost

    def _go_on(self, stream: Stream, done: int, length: int) -> None:
        """What the stream verifies next, and what the drafter knows of it."""
        if stream.served:
            fed = done - (stream.accepted > stream.fed) - 1
            if stream.accepted == stream.chain and stream.rank == 0:
                fed += stream.ahead
            fed = min(fed, self._policy.depth - 1)
            stream.chain, stream.behind = stream.served, 0
            stream.fed, stream.ahead = min(fed, stream.chain), max(fed - stream.chain, 0)
        else:
            stream.chain, stream.fed, stream.ahead, stream.behind = length, max(length - 1, 0), 0, int(not length)
