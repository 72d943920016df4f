"""Simulates rounds by arithmetic: the tokens per second of a profile's machine under a policy, without processes,
messages or models. It computes tens of thousands of rounds per second.

Times come from the profile's curves, outcomes from the random draws of a text (`TextDraws`): whether the drafter's
proposal at a position is right, and the rank of the true token if it is not. A text has the same draws under every
policy. Tests compare the results with the real rounds in virtual time. The rounds of a batch are in step: if one
sequence waits, all wait (paper, corollary 16).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul

from outrider.drafters.fan_out import FAN_OUT_POLICIES
from tools.simulation.odds import KnownOdds, TextDraws
from tools.simulation.profile import Profile

# A millisecond is worth the rate itself, which a pilot run over the text's length divided by this measures.
PILOT_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a round; `mode` is ar, sd or ssd.

    `anytime`: branches are used as deep as they are; else a round waits until all are complete. `adaptive_fallback`:
    after a miss, the best of an AR step and a chain on request of any length; else always a chain of K tokens.
    `branch_waits`: an outcome may wait for branches that are still to arrive.
    """

    mode: str = "ssd"
    depth: int = 4
    branches: int = 10
    fan_out: str = "best-first"
    anytime: bool = True
    adaptive_fallback: bool = True
    branch_waits: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run; tokens of all sequences of a batch together. `busy`: the target's share of the time."""

    tokens_per_second: float
    tokens_per_round: float
    hit_rate: float
    round_ms: float
    busy: float


@dataclass(slots=True)
class Stream:
    """One sequence. `chain` tokens are under verification at position `at`. The drafter has fed `fed` of them and
    `ahead` tokens after the whole chain; it must first read `behind` committed tokens."""

    text: TextDraws
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
    """The drafter's forwards of a round, from `start`; they end at `ends`."""

    start: float
    ends: list[float] = field(default_factory=list)

    def done(self, at: float) -> int:
        """Returns how many forwards have ended by `at`."""
        return bisect_right(self.ends, at)

    def free(self, at: float) -> tuple[float, int]:
        """Returns when the drafter handles a message that arrives at `at`, after the current forward, and how many
        forwards have ended by then."""
        done = self.done(at)
        started = self.ends[done - 1] if done else self.start
        if done == len(self.ends) or at == started:
            return max(at, self.start), done
        return (self.start, 0) if at < started else (self.ends[done], done + 1)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A chain on request of `length` tokens (0: an AR step); `value`: its expected tokens minus the cost of its
    time."""

    length: int
    value: float


class Simulator:
    """One machine and policy with `batch` sequences. `hop_ms`: the time of any message beyond the profile's link."""

    def __init__(self, profile: Profile, policy: Policy, batch: int = 1, hop_ms: float = 0.0) -> None:
        self._profile, self._policy, self._batch = profile, policy, batch
        self._hop_ms, self._message_ms = hop_ms, hop_ms + profile.link_ms
        self._odds = KnownOdds(profile)
        self._target_ms, self._draft_ms = cache(profile.target), cache(profile.draft)
        self._reach_probability: list[float] = list(accumulate(map(self._odds.acceptance, range(policy.depth)), mul))
        self._tokens: list[float] = [1.0, *(1.0 + total for total in accumulate(self._reach_probability))]
        self._fan_out = cache(self._compute_fan_out)
        self._tokens_per_ms = 0.0

    def run(self, tokens: int, seed: int = 0) -> Result:
        """Runs over random texts of `tokens` tokens, drawn from `seed`."""
        return self.play([TextDraws.draw(self._profile, tokens, seed + index) for index in range(self._batch)])

    def play(self, texts: Sequence[TextDraws]) -> Result:
        """Runs over texts with these draws, until a text ends."""
        tokens = min(len(text.uniform) for text in texts) - self._policy.depth - 1
        self._tokens_per_ms = self._batch / self._target_ms(self._batch)
        self._tokens_per_ms = self._play(texts, tokens // PILOT_DIVISOR).tokens_per_second / 1000
        return self._play(texts, tokens)

    def _play(self, texts: Sequence[TextDraws], length: int) -> Result:
        streams = [Stream(text) for text in texts]
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
            known = now + verify_ms + 2 * self._hop_ms
            if self._policy.mode == "sd":
                now = self._draft(streams, known)
            else:
                now, free, found = self._look_up(
                    streams, self._work_ahead(streams, max(now + self._message_ms, free)), known
                )
                hits += found
        return Result(tokens / now * 1000, tokens / rounds, hits / (rounds * len(streams)), now / rounds, busy / now)

    # --- the target -----------------------------------------------------------------------------------------------

    def _verify_ms(self, streams: Sequence[Stream]) -> float:
        return self._target_ms(sum(1 + stream.chain for stream in streams))

    def _verify(self, stream: Stream) -> None:
        """Sets the outcome: the accepted tokens, and the bonus token's rank among the drafter's candidates."""
        text, accepted = stream.text, 0
        while accepted < stream.chain and text.uniform[stream.at + accepted] < self._odds.acceptance(accepted):
            accepted += 1
        at = stream.at + accepted
        stream.accepted, stream.rank = accepted, text.ranks[at]
        if accepted == stream.chain:
            right = text.uniform[at] < self._odds.acceptance(0)
            stream.rank = 0 if right else text.ranks[at] + 1
        stream.at = at + 1

    # --- the drafter ----------------------------------------------------------------------------------------------

    def _draft(self, streams: Sequence[Stream], known: float) -> float:
        """SD: gives every sequence a chain of K tokens, and returns when the next verify begins. The last token of an
        accepted chain was never fed."""
        unread = sum(2 if 0 < stream.chain == stream.accepted else 1 for stream in streams)
        for stream in streams:
            stream.chain = self._policy.depth
        chained_ms = (self._policy.depth - 1) * self._draft_ms(len(streams))
        return known + 2 * self._message_ms + self._draft_ms(unread) + chained_ms

    def _work_ahead(self, streams: Sequence[Stream], start: float) -> Work:
        """Returns the work ahead. Branches that need the unfed end of a chain begin one forward later."""
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

    def _compute_fan_out(self, chain: int) -> list[int]:
        return FAN_OUT_POLICIES[self._policy.fan_out]([None] * (chain + 1), self._policy.branches, self._odds)

    def _depth(self, stream: Stream, forwards: int) -> int:
        """Returns the depth of the outcome's branch after `forwards` forwards; 0 if it does not exist (yet)."""
        if stream.rank >= self._fan_out(stream.chain)[stream.accepted]:
            return 0
        ahead = stream.ahead if stream.accepted == stream.chain and stream.rank == 0 else 0
        grown = forwards - (stream.accepted > stream.fed)
        return min(grown + ahead, self._policy.depth) if grown > 0 else 0

    # --- between two rounds ---------------------------------------------------------------------------------------

    def _look_up(self, streams: Sequence[Stream], work: Work, known: float) -> tuple[float, float, int]:
        """Returns when the next verify begins, when the drafter handles its commit, and the number of hits."""
        now = self._lookup_time(streams, work, known)
        pushed = work.done(now - self._message_ms)
        missed = []
        for stream in streams:
            stream.served = self._depth(stream, pushed)
            if not stream.served:
                missed.append(stream)
        free, done = work.free(now + self._message_ms)
        length = self._best_fallback(len(missed), len(streams), free - now).length if missed else 0
        if length:
            grown = min(self._depth(stream, done) for stream in missed)  # tokens grown in the meantime are used
            free += max(length - grown, 0) * self._draft_ms(len(missed))
            now = free + self._message_ms
        for stream in streams:
            self._set_next_chain(stream, done, length)
        return now, free, len(streams) - len(missed)

    def _lookup_time(self, streams: Sequence[Stream], work: Work, known: float) -> float:
        """Returns the time of the lookup: at once, or when waiting for the next forward no longer pays."""
        if not self._policy.anytime:
            return max(known, work.ends[-1] + self._message_ms)
        now, pushed = known, work.done(known - self._message_ms)
        while pushed < len(work.ends):
            arrives = work.ends[pushed] + self._message_ms
            gain = sum(self._gain(stream, pushed, len(streams), work, now) for stream in streams)
            if gain <= self._tokens_per_ms * (arrives - now):
                break
            now, pushed = arrives, pushed + 1
        return now

    def _gain(self, stream: Stream, pushed: int, streams: int, work: Work, now: float) -> float:
        """Returns the expected tokens, minus the cost of later times, that the next push adds to a stream."""
        depth = self._depth(stream, pushed)
        if depth:
            return self._reach_probability[depth] if depth < self._policy.depth else 0.0
        if not self._policy.branch_waits or pushed > (stream.accepted > stream.fed):
            return 0.0
        full = stream.accepted == stream.chain
        count = self._fan_out(stream.chain)[stream.accepted]
        prepared = sum(self._odds.bonus_probability(full, rank) for rank in range(count))
        step_ms = self._draft_ms(self._policy.branches * streams)
        hit = max(self._value(1, streams, depth, (depth - 1) * step_ms) for depth in range(1, self._policy.depth + 1))
        return prepared * (hit - self._best_fallback(1, streams, work.free(now + self._message_ms)[0] - now).value)

    def _best_fallback(self, missed: int, streams: int, delay_ms: float) -> Fallback:
        """Returns the best fallback: a chain on request, or an AR step (length 0) while the drafter continues."""
        step_ms, whole = self._draft_ms(missed), self._policy.depth

        def fallback(length: int) -> Fallback:
            wait_ms = delay_ms + length * step_ms + self._message_ms if length else 0.0
            return Fallback(length, self._value(missed, streams, length, wait_ms))

        if not self._policy.adaptive_fallback:
            return fallback(whole)
        return max(map(fallback, range(whole + 1)), key=lambda choice: choice.value)

    def _value(self, ours: int, streams: int, length: int, wait_ms: float) -> float:
        """Returns the expected tokens of `ours` streams with chains of `length`, minus the cost of wait and verify."""
        others = (streams - ours) * (1 + self._policy.depth)
        cost = wait_ms + self._target_ms(others + ours * (1 + length))
        return ours * self._tokens[length] - self._tokens_per_ms * cost

    def _set_next_chain(self, stream: Stream, done: int, length: int) -> None:
        """Sets the chain that the stream verifies next, and how much of it the drafter has fed."""
        if stream.served:
            fed = done - (stream.accepted > stream.fed) - 1
            if stream.accepted == stream.chain and stream.rank == 0:
                fed += stream.ahead
            fed = min(fed, self._policy.depth - 1)
            stream.chain, stream.behind = stream.served, 0
            stream.fed, stream.ahead = min(fed, stream.chain), max(fed - stream.chain, 0)
        else:
            stream.chain, stream.fed, stream.ahead, stream.behind = length, max(length - 1, 0), 0, int(not length)
