"""Simulates rounds of mode `auto` with the real planner, estimates and proposals; no processes, messages or clock.

A `Server` plays texts under the policy's plans, or under one fixed plan, and feeds the estimates with what the planner
reports of real rounds. Whether a proposed token is right is drawn by position and drafter, so a text has the same draws
under every plan. The rounds of several requests are in step. Tokens are positions: the right token at position p is
p + 1, and wrong ones are negative.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from outrider.drafters.fan_out import best_first
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.acceptance import TextAcceptance, classify_text
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.proposal import (
    CopiedTail,
    CopyRound,
    Lookup,
    Proposal,
    best_tail,
    choose_fallback,
    extend_by_copy,
    longest_copy,
    merge_into_tree,
    propose_copy,
    should_draft,
    should_wait_for_branch,
    should_wait_for_token,
)
from outrider.orchestrator.events import Admit
from outrider.protocol.heads import NGRAM
from outrider.protocol.ngrams import MAX_COPY_TOKENS, Copy, NgramIndex
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Origin
from outrider.protocol.trees import accepted_path, chain_parents, node_depths
from tools.simulation.odds import KnownOdds, draw_ranks
from tools.simulation.profile import Profile

DRAFT_WORKER = ""
ROOM_TOKENS = 64
MAX_MATCH_TOKENS = 5  # the longest match that an n-gram lookup knows
MIN_MATCH_TOKENS = 2


@dataclass(frozen=True, slots=True)
class TextKind:
    """A kind of text. `acceptance`: how often a token of each drafter is right. `repeats`: the share of tokens that
    repeat earlier ones, in passages of `passage` tokens on average. `is_code_like`: the front thread takes it for code.
    `prompt_repeats`: the prompt repeats itself, too (a prompt to be edited does not; only the answer repeats it)."""

    name: str
    acceptance: Mapping[str, float]
    repeats: float = 0.05
    passage: float = 16.0
    is_code_like: bool = False
    prompt_repeats: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """The costs of a machine in milliseconds.

    `in_process_ms`: a token of each in-process drafter. `all_cores`: the time of a forward on all cores, as a share of
    one beside a drafter. `noise`: the standard deviation of the logarithm of a round's time; every `outlier`th round
    takes ten times as long. `cold_ms`: the additional time of a worker's first forward.
    """

    profile: Profile
    in_process_ms: Mapping[str, float] = field(default_factory=dict)
    all_cores: float = 1.0
    turnaround_ms: float = 0.3
    noise: float = 0.05
    outlier: int = 0
    cold_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class BranchState:
    """The work ahead for an outcome at the end of a verify: whether it has a branch (`lookup`), the branch's depth, the
    milliseconds since the last push, and how many pushes are `missing` until it has one."""

    lookup: Lookup
    depth: int
    since_ms: float
    missing: int


class Text:
    """One text and its random outcomes, generated up to position `at`; the server sets its `acceptance`."""

    is_empty = False
    acceptance: TextAcceptance

    def __init__(self, kind: TextKind, profile: Profile, length: int, rng: random.Random) -> None:
        self.kind, self.length, self.at = kind, length, 0
        size = length + 2 * ROOM_TOKENS
        self.right = {drafter: [rng.random() < p for _ in range(size)] for drafter, p in kind.acceptance.items()}
        self.ranks = draw_ranks(profile, size, rng)
        self._starts, self._ends = _draw_passages(kind, size, rng)
        self._chance = [rng.random() for _ in range(size)]
        self.prompt = _draw_prompt(kind, rng)
        self.branch: BranchState | None = None
        self.rounds = self.covered = 0
        self.copy = self.lookup(MAX_COPY_TOKENS)
        self.copy_round: CopyRound | None = None
        self.silent = 0  # tokens since a draft worker last drafted

    def chain(self, drafter: str, length: int) -> tuple[int, ...]:
        """Returns a drafter's chain: wrong from its first error on."""
        right = self.right[drafter]
        correct = next((i for i in range(length) if not right[self.at + i]), length)
        mark = -1 - list(self.right).index(drafter) * 10**6
        return tuple(self.at + i + 1 if i < correct else mark - self.at - i for i in range(length))

    def lookup(self, length: int, then: Sequence[int] = ()) -> Copy:
        """Stands for `NgramIndex.lookup`: copies hold to the end of a repeated passage."""
        at = self.at + len(then)
        if length < 1 or (then and then[-1] != at) or at >= len(self._ends):
            return Copy()
        start, end = self._starts[at], self._ends[at]
        if end and at - start >= MIN_MATCH_TOKENS:
            matched, correct = min(at - start, MAX_MATCH_TOKENS), end - at
        elif self._chance[at] < 0.35:
            matched, correct = MIN_MATCH_TOKENS, int(self._chance[at] < 0.08)
        else:
            return Copy()
        return Copy(tuple(at + i + 1 if i < correct else -(10**8) - at - i for i in range(length)), matched)

    def accepted(self, proposal: Proposal) -> tuple[int, ...]:
        """Returns the accepted nodes."""
        parents = proposal.parents or chain_parents(len(proposal.chain))
        choices = [self.at + 1, *(self.at + depth + 2 for depth in node_depths(parents))]
        return accepted_path(proposal.chain, parents, choices)


def _draw_passages(kind: TextKind, size: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Returns for each position where the repeated passage around it begins and ends; 0, 0 outside of one."""
    starts, ends = [0] * size, [0] * size
    at, new = 0, kind.passage * (1 - kind.repeats) / max(kind.repeats, 1e-9)
    while at < size:
        at += 1 + int(rng.expovariate(1 / new))
        end = min(at + 3 + int(rng.expovariate(1 / kind.passage)), size)
        for place in range(at, end):
            starts[place], ends[place] = at, end
        at = end
    return starts, ends


def _draw_prompt(kind: TextKind, rng: random.Random) -> list[int]:
    """Returns a prompt in which words are as frequent as in a natural text, and passages repeat as in its text."""
    tokens: list[int] = []
    for _ in range(rng.choice((12, 60, 300, 700))):
        if kind.prompt_repeats and len(tokens) > 20 and rng.random() < kind.repeats / kind.passage:
            at = rng.randrange(len(tokens) - 10)
            tokens += tokens[at : at + int(kind.passage)]
        tokens.append(int(4000 ** rng.random()))
    return tokens


@dataclass(slots=True)
class Server:
    """A server on `machine`; `plan`: a fixed plan in place of the policy's."""

    machine: Machine
    planner: Planner
    rng: random.Random
    plan: Arm | None = None
    drafter_slowdown: float = 1.0
    """How many times as long as in the profile the drafter's work takes."""
    plans: Counter[Arm] = field(default_factory=Counter)
    _forwards: int = 0
    _last: Arm = field(default_factory=lambda: Arm("ar"))

    def play(self, texts: Sequence[Text], reading: int = 0) -> float:
        """Plays texts that begin together; returns the milliseconds. Rounds take longer while their prompts are read:
        the first `reading` plain ones, and more of others, since prompts are read more slowly beside chains."""
        running, spent, unread = list(texts), 0.0, float(reading)
        for text in running:
            looks = classify_text(text.prompt, False, text.kind.is_code_like)
            text.acceptance = self.planner.open_text(looks, greedy=True)
        self.planner.set_load(len(running))
        while running:
            spent += self._round(running, 1.35 if unread > 0 else 1.0)
            running = [text for text in running if text.at < text.length]
            unread -= 1.0 if self._last.mode == "ar" else 0.6
            self.planner.set_load(len(running))
        return spent

    # --- a round --------------------------------------------------------------------------------------------------

    def _round(self, texts: Sequence[Text], reading: float) -> float:
        planner, e, count = self.planner, self.planner.estimates, len(texts)
        policy = planner._policy(ADMIT, planner._sources("", 1 if self._has_worker else 0), texts[0].acceptance)
        plan = self.plan or policy.plan()
        self.plans[plan] += 1
        steps = [self._step(text, plan, count) for text in texts]
        rows = sum(1 + len(step.proposal.chain) for step in steps)
        plain = all(step.proposal.autonomous for step in steps)
        noise = self.rng.lognormvariate(0.0, self.machine.noise) * reading
        if self.machine.outlier and self.rng.random() < 1 / self.machine.outlier:
            noise *= 10.0
        resting = plan.leaves_drafters_idle(count)
        verify_ms = self.machine.profile.target(rows) * noise * (self.machine.all_cores if resting else 1.0)
        in_process_ms = max(step.in_process_ms for step in steps)
        request_waits = [step.request_ms for step in steps if step.request_ms]
        waits = sum(step.wait_ms for step in steps) / count
        if count == 1:
            round_ms = verify_ms + in_process_ms + sum(request_waits) + waits
        else:
            round_ms = max(in_process_ms + waits + verify_ms + sum(request_waits) / count, sum(request_waits))
        hit = plan.mode == "ssd" and all(step.proposal.lookup is Lookup.HIT for step in steps)
        round_ms += 0.0 if plain else self.machine.turnaround_ms * (1.0 if hit else 2.0)
        if not plain:
            e.observe_verify(rows, verify_ms, rows // count, resting)
        for text, step in zip(texts, steps, strict=True):
            self._record_round(text, step, plan, round_ms, verify_ms, count)
            policy.acceptance = text.acceptance if count == 1 else policy.acceptance
            if text.rounds > 1:
                policy.observe_round(plan, step.committed, round_ms, step.proposal.lookup.found)
        self._last = plan
        return round_ms

    @property
    def _has_worker(self) -> bool:
        return self.planner._settings.drafters > 0

    def _record_round(self, text: Text, step: Step, plan: Arm, round_ms: float, verify_ms: float, count: int) -> None:
        """Reports a round as `Planner.on_outcome` does, and lets the draft worker work ahead."""
        e, proposal = self.planner.estimates, step.proposal
        nodes = text.accepted(proposal)
        committed = tuple(range(text.at + 1, text.at + len(nodes) + 2))
        step.committed, along = len(committed), proposal.count_on_chain(nodes)
        own = proposal.drafter if proposal.source is Origin.HEAD else ""
        drafted = len(proposal.offered or proposal.drafter_nodes)
        e.observe_round(len(committed), round_ms)
        if proposal.autonomous:
            e.pipelined_ms.add(count, round_ms)
        else:
            if count == 1:
                text.acceptance.observe(own, drafted, along)
            if own:
                e.in_process[own].observe(drafted, along, step.in_process_ms)
            else:
                e.observe_chain(drafted, along, min(len(proposal.chain), drafted))
        if proposal.lookup is Lookup.HIT:
            e.observe_turnaround(self.machine.turnaround_ms)
        self._judge_copy(text, proposal, committed, count)
        line = proposal.line
        off_line = committed[:-1] != line[: len(nodes)]
        text.rounds += 1
        text.silent += len(committed)
        text.branch = (
            self._work_ahead(text, line, len(nodes), off_line, plan, verify_ms, count) if plan.mode == "ssd" else None
        )

    def _judge_copy(self, text: Text, proposal: Proposal, committed: Sequence[int], count: int) -> None:
        """Reports how copies would have done, as `Planner` does."""
        e, copy, drafted = self.planner.estimates, text.copy, proposal.drafter_nodes
        e.copied.add(copy, committed)
        if drafted and copy.chain and proposal.chain[drafted[0]] != copy.chain[0]:
            e.alternatives.add(copy, committed)
        text.at += len(committed)
        text.copy, round_ = text.lookup(MAX_COPY_TOKENS), text.copy_round
        if round_ is not None:
            right = round_.right(range(round_.base_len + 1, text.at + 1))
            if right is None:
                return
            e.copies.add(round_.rows, right)
            if count == 1:
                text.acceptance.observe_copies(round_.rows, right)
        text.copy_round = CopyRound(text.at, text.copy, len(best_tail(e, text.copy).tokens))

    def _work_ahead(
        self, text: Text, line: Sequence[int], accepted: int, off_line: bool, plan: Arm, verify_ms: float, count: int
    ) -> BranchState:
        """Simulates the draft worker's work ahead during a verify."""
        e, profile = self.planner.estimates, self.machine.profile
        branches = max(plan.branches, 1)
        step_ms = self._draft_ms(branches * count)
        behind = self._draft_ms(-(-text.silent // 16)) * text.silent / 16 if text.silent > 8 else 0.0
        text.silent = 0
        window = verify_ms - 2 * profile.link_ms - behind
        pushes = max(int(window / step_ms), 0)
        full = accepted == len(line)
        at = text.at - 1
        rank = text.ranks[at] + full if not (full and text.right[DRAFT_WORKER][at]) else 0
        found = not off_line and rank < self._fan_out(len(line), branches)[accepted]
        late = int(full and accepted > 0)
        depth = min(pushes - late, plan.depth)
        for _ in range(min(pushes, plan.depth)):
            e.observe_depth(branches, step_ms)
        text.covered = branches if pushes > late else 0
        since = max(window - pushes * step_ms, 0.0)
        return BranchState(Lookup.HIT if found else Lookup.MISS, depth, since, max(1 + late - pushes, 0))

    def _draft_ms(self, rows: int) -> float:
        self._forwards += 1
        cold = self.machine.cold_ms / self._forwards if self._forwards <= 4 else 0.0
        noise = self.rng.lognormvariate(0.0, self.machine.noise)
        return self.machine.profile.draft(max(rows, 1)) * self.drafter_slowdown * noise + cold

    def _fan_out(self, chain: int, branches: int) -> Sequence[int]:
        return _fan_out(self.machine.profile, chain, branches)

    # --- proposals ------------------------------------------------------------------------------------------------

    def _step(self, text: Text, plan: Arm, count: int) -> Step:
        """Decides what a text verifies, as `Proposer` does."""
        e, ngrams, depth = self.planner.estimates, cast("NgramIndex", text), plan.depth
        if plan.mode == "ar":
            return Step(Proposal(autonomous=True))
        tail = best_tail(e, longest_copy(ngrams, ROOM_TOKENS))
        if plan.mode == "sd":
            if plan.drafter == NGRAM:
                return Step(propose_copy(tail.tokens) if tail.tokens else Proposal(autonomous=True))
            if not should_draft(e, tail, depth, plan.drafter):
                return Step(propose_copy(tail.tokens))
            return self._in_process_chain(text, plan, depth) if plan.drafter else self._requested_chain(text, depth)
        if text.branch is None:
            return self._after_miss(text, plan, Lookup.NONE)
        e.observe_lookup(text.branch.lookup is Lookup.HIT, text.covered)
        step_ms = self._draft_ms(max(plan.branches, 1) * count)
        return self._look_up(text, text.branch, plan, tail, step_ms)

    def _look_up(self, text: Text, branch: BranchState, plan: Arm, tail: CopiedTail, step_ms: float) -> Step:
        """Decides what a text verifies after the draft worker has worked ahead. `step_ms`: between two pushes."""
        e, depth, deep, since_ms = self.planner.estimates, plan.depth, branch.depth, branch.since_ms
        if branch.lookup is Lookup.HIT and deep > 0:
            wait_ms = 0.0
            while deep < depth and should_wait_for_token(e, deep, since_ms):
                wait_ms, since_ms, deep = wait_ms + max(step_ms - since_ms, 0.0), 0.0, deep + 1
            return self._branch(text, deep, Lookup.GROWN if wait_ms else Lookup.HIT, wait_ms)
        if branch.missing:
            choice = choose_fallback(e, tail, depth, True, plan.drafter)
            wait_ms = branch.missing * step_ms - since_ms
            if should_wait_for_branch(e, choice, depth, max(branch.missing * e.depth_ms() - since_ms, 0.0)):
                if branch.lookup is Lookup.HIT:
                    return self._branch(text, 1, Lookup.LATE, wait_ms)
                step = self._after_miss(text, plan, Lookup.MISS)
                step.wait_ms += wait_ms
                return step
        return self._after_miss(text, plan, Lookup.MISS)

    def _after_miss(self, text: Text, plan: Arm, lookup: Lookup) -> Step:
        e = self.planner.estimates
        tail = best_tail(e, longest_copy(cast("NgramIndex", text), ROOM_TOKENS))
        choice = choose_fallback(e, tail, plan.depth, True, plan.drafter)
        if choice.wait_for:
            return self._requested_chain(text, choice.wait_for, lookup)
        if choice.in_process:
            return self._in_process_chain(text, plan, choice.in_process, lookup)
        return Step(replace(propose_copy(tail.tokens), lookup=lookup))

    def _in_process_chain(self, text: Text, plan: Arm, depth: int, lookup: Lookup = Lookup.NONE) -> Step:
        chain = text.chain(plan.drafter, depth)
        proposal = Proposal(chain, Origin.HEAD, lookup, drafter=plan.drafter)
        return Step(proposal, in_process_ms=depth * self.machine.in_process_ms[plan.drafter])

    def _requested_chain(self, text: Text, depth: int, lookup: Lookup = Lookup.NONE) -> Step:
        """Returns a chain on request; a worker that has not drafted for long reads the text first."""
        e = self.planner.estimates
        work_ms = sum(self._draft_ms(1) for _ in range(depth))
        link_ms = 2 * self.machine.profile.link_ms + 0.2
        behind = self._draft_ms(text.silent // 16) * text.silent / 16 if text.silent > 8 else 0.0
        text.silent = 0
        e.observe_draft(depth, work_ms)
        e.observe_link(link_ms)
        chain = text.chain(DRAFT_WORKER, depth)
        extended = self._extend(text, Proposal(chain, Origin.DRAFTED, lookup, offered=chain))
        return Step(extended, request_ms=work_ms + link_ms + behind)

    def _branch(self, text: Text, depth: int, lookup: Lookup, wait_ms: float) -> Step:
        chain = text.chain(DRAFT_WORKER, depth)
        branch = Proposal(chain, Origin.PREPARED, lookup, offered=chain)
        return Step(self._extend(text, branch), wait_ms=wait_ms)

    def _extend(self, text: Text, branch: Proposal) -> Proposal:
        e, ngrams = self.planner.estimates, cast("NgramIndex", text)
        return merge_into_tree(e, ngrams, branch, (), ROOM_TOKENS) or extend_by_copy(e, ngrams, branch, (), ROOM_TOKENS)


@dataclass(slots=True)
class Step:
    """What a text verifies next, and the milliseconds of the wait, chain on request and own drafting before it."""

    proposal: Proposal
    wait_ms: float = 0.0
    request_ms: float = 0.0
    in_process_ms: float = 0.0
    committed: int = 0


@cache
def _fan_out(profile: Profile, chain: int, branches: int) -> Sequence[int]:
    return best_first([None] * (chain + 1), branches, KnownOdds(profile))


ADMIT = Admit("r", (1, 2), SamplingParams(), "auto", frozenset())
