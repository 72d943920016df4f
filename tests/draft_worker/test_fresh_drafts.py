"""Every chain that a draft worker sends is the one that a fresh drafter, without a cache, drafts after the same tokens.

A corrupt cache is not visible in a text, only in how often drafts are accepted. So a worker gets random rounds of
several requests: outcomes that it has prepared and others, chains on request, rounds that it is not told of, lost
commits, requests that end, begin again or share a prefix with an earlier one. With a head it also gets the target's
features.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import Drafter
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import BlockHead
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import load
from outrider.grammar.constraint import Constraint
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    Features,
    KvMemory,
    Message,
    Open,
    Resync,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ, TreeFeed
from tests.system.links import FakeLink, Idle
from tests.target_worker.block_heads import block_head, gated_head, parallel_head
from tests.target_worker.heads import markov_llama, mtp_head, random_head, recurrent_head, unrounded
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("counted_clock")

SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "1"))
STEPS = int(os.environ.get("OUTRIDER_STEPS", "150"))
TIE = 2e-3
EOS = 0
MakeDrafter = Callable[[], Drafter]
Tokens = Sequence[int]

COUPLED: list[dict[str, Any]] = [
    {},
    {"temp": 0.8},
    {"temp": 0.8, "top_k": 5},
    {"temp": 0.8, "top_p": 0.9},
    {"temp": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temp": 0.8, "presence_penalty": 1.0, "logit_bias": ((5, 3.0), (9, -4.0))},
]
DRAWN: list[dict[str, Any]] = [
    {"temp": 0.8, "rule": "residual"},
    {"temp": 1.0, "rule": "residual", "saguaro": 0.5, "q_width": 6},
    {"temp": 0.8, "rule": "residual", "top_p": 0.9},
]


class RandomGrammar(Constraint):
    """Allows half of the tokens, which depend on the three generated tokens before."""

    def __init__(self, start: int) -> None:
        super().__init__((EOS,), start, vocabulary_size=VOCAB_SIZE)
        self._first = start

    def allowed(self, texts: Sequence[Tokens]) -> Any:
        draws = [np.random.default_rng([7, *text[self._first :][-3:]]) for text in texts]
        return np.stack([draw.integers(0, 2**32, self.width).astype(np.uint32) for draw in draws])


class Compiler:
    """Gives requests whose name ends with "g" a grammar."""

    def constraint_of(self, opened: Open) -> Constraint | None:
        return RandomGrammar(opened.prompt_len) if opened.request.endswith("g") else None


def features_of(text: Tokens, width: int) -> np.ndarray[Any, Any]:
    """The target's features, which depend on all tokens up to their own."""
    state, rows = np.zeros(width), []
    for token in text:
        state = 0.7 * np.roll(state, 1) + np.random.default_rng(token).standard_normal(width)
        rows.append(state)
    return np.array(rows).astype(np.float16)


@dataclass
class Story:
    """What the orchestrator knows of a request.

    `sent`: the number of tokens that the drafter knows. `chain` is under verification, `branches` are those that came
    for its outcomes. The drafter gets features from the position `first_row` on, as if it had joined there.
    """

    name: str
    sampling: SamplingParams
    text: list[int]
    prompt_len: int
    fan_out: int
    epoch: int = 0
    round: int = 0
    sent: int = 0
    first_row: int = 0
    chain: tuple[int, ...] = ()
    commit: Commit | None = None
    branches: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


class Stories:
    """A worker with random requests. `compared`: the number of tokens that a fresh drafter was asked for."""

    def __init__(self, make: MakeDrafter, samplings: Sequence[dict[str, Any]], seed: int) -> None:
        self.compared = self.hits = self._count = 0
        self._rng, self._samplings = random.Random(seed), samplings
        self._link, self._fresh = FakeLink("draft-0"), make()
        self._worker = DraftWorker(self._link, make(), FAN_OUT_POLICIES["best-first"], compiler=Compiler())  # type: ignore[arg-type]
        self._stories: dict[str, Story] = {}
        self._ended: list[list[int]] = []
        self._link.inbox.append(KvMemory(1 << 26))

    def run(self, steps: int) -> None:
        rng = self._rng
        for _ in range(steps):
            way = rng.random()
            if not self._stories or (way < 0.08 and len(self._stories) < 4):
                self._begin()
            elif way < 0.12:
                self._end(self._any())
            elif way < 0.15:
                self._open(self._any(), resumed=1)
            else:
                self._next_round(self._any())
            if rng.random() < 0.8:
                self._turns(rng.choice((1, 2, 3, 5, 12)))
        self._turns(400)

    def _any(self) -> Story:
        return self._rng.choice(list(self._stories.values()))

    # --- the orchestrator's side ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        rng, self._count = self._rng, self._count + 1
        name = f"{self._count}{'g' if rng.random() < 0.25 and self._samplings is COUPLED else ''}"
        chosen = rng.choice(self._samplings)
        seed = rng.randrange(1000) if "temp" in chosen else None
        text = [rng.randrange(2, 200) for _ in range(rng.choice((1, 2, 5, 20, 40, 150)))]
        if self._ended and rng.random() < 0.6:
            before = rng.choice(self._ended)[:400]
            text = [*before[: rng.randrange(1, len(before) + 1)], *text[: rng.choice((1, 1, 5, 30))]]
        sampling = SamplingParams(max_tokens=200, seed=seed, **chosen)
        self._stories[name] = Story(name, sampling, text, len(text), rng.choice((1, 2, 4)))
        self._open(self._stories[name])

    def _open(self, story: Story, resumed: int = 0) -> None:
        story.epoch, story.round, story.sent = story.epoch + resumed, story.round + resumed, len(story.text)
        story.chain, story.branches, story.commit = (), {}, None
        tokens, generated = np.array(story.text, np.int32), len(story.text) - story.prompt_len
        self._link.inbox.append(
            Open(story.name, story.epoch, story.round, tokens, story.sampling, (EOS,), generated, story.fan_out)
        )
        story.first_row = len(story.text) - 1 if self._rng.random() < 0.2 else 0
        self._send_features(story, story.first_row)
        if self._rng.random() < 0.7:
            self._commit(story)

    def _send_features(self, story: Story, begin: int) -> None:
        """Sends those from a position on, a long text's in two parts."""
        if not isinstance(self._fresh, HeadDrafter):
            return
        rows = self._features(story.text)[begin:-1]
        cut = self._rng.randrange(len(rows)) if len(rows) > 20 else 0
        if cut:
            self._link.inbox.append(Features(story.name, story.epoch, begin, rows[:cut]))
            self._turns(self._rng.choice((0, 8)))
        self._link.inbox += [Features(story.name, story.epoch, begin + cut, rows[cut:])] if len(rows) else []

    def _features(self, text: Tokens) -> np.ndarray[Any, Any]:
        assert isinstance(self._fresh, HeadDrafter)
        rows = features_of(text, 64)
        is_recurrent = self._fresh.head.reach == 1  # its feature is the row, and a state that is 0 before a chain
        return np.concatenate([rows, 0 * rows], axis=1) if is_recurrent else rows

    def _end(self, story: Story) -> None:
        del self._stories[story.name]
        self._ended = [*self._ended[-6:], story.text]
        self._link.inbox.append(Close(story.name))

    def _next_round(self, story: Story) -> None:
        rng, following = self._rng, tuple[int, ...]()
        if story.branches and rng.random() < 0.75:
            new, following = rng.choice(list(story.branches.items()))
            self.hits += 1
        else:
            new = (*story.chain[: rng.randint(0, len(story.chain))], rng.randrange(2, 200))
        position = len(story.text) - 1
        story.text, story.round = [*story.text, *new], story.round + 1
        story.chain, story.branches, story.commit = (), {}, None
        if len(story.text) > 700:
            self._end(story)
            return
        self._send_features(story, position)
        if rng.random() < 0.1:
            self._turns(2)
        way = rng.random()
        if way < 0.15:
            return  # the drafter is not told of the round
        if way > 0.4:
            copied = [rng.randrange(2, 200) for _ in range(rng.randint(1, 3) if way > 0.8 else 0)]
            story.chain = (*following[: rng.randint(0, len(following))], *copied)
        self._commit(story)

    def _commit(self, story: Story) -> None:
        rng = self._rng
        is_request, depth = rng.random() < 0.25, rng.randint(1, 4)
        story.round += is_request
        unsent = tuple(story.text[story.sent :])
        branches, offset, min_prob = rng.choice((1, 4, 10)), rng.choice((0, 0, 0, 3)), rng.choice((1.0, 1.0, 0.02))
        begin = story.name, story.epoch, story.round, len(story.text), unsent
        if is_request:
            story.chain, story.commit = (), Commit(*begin, None, depth, 0, min_prob=min_prob)
        else:
            story.commit = Commit(*begin, story.chain, depth, branches, offset, min_prob)
        story.branches, story.sent = {}, len(story.text)
        if rng.random() < 0.05:
            story.commit = None  # it is lost
        else:
            self._link.inbox.append(story.commit)

    # --- the worker's side ----------------------------------------------------------------------------------------

    def _turns(self, count: int) -> None:
        for _ in range(count):
            try:
                self._worker.turn()
            except Idle:
                return
            while self._link.sent:
                self._receive(self._link.sent.popleft())

    def _receive(self, message: Message) -> None:
        assert not isinstance(message, Fault), message
        if not isinstance(message, Branches | Drafted | Resync):
            return
        story = self._stories.get(message.request)
        if isinstance(message, Resync) and story is not None and message.epoch == story.epoch:
            self._open(story)
        if (
            isinstance(message, Resync)
            or story is None
            or story.commit is None
            or (message.epoch, message.round) != (story.epoch, story.commit.round)
        ):
            return
        if isinstance(message, Drafted):
            self._check(story, story.commit, (), message.chain, message.q)
            story.chain = message.chain
            return
        end = 0
        for entry in message.entries:
            start, end = end, end + len(entry.chain)
            assert entry.committed[:-1] == story.chain[: len(entry.committed) - 1] and entry.committed[-1] != EOS
            if self._rng.random() < 0.3:
                q = message.q.part(start, end) if message.q is not None else None
                self._check(story, story.commit, entry.committed, entry.chain, q)
            story.branches[entry.committed] = entry.chain

    # --- the fresh drafter ----------------------------------------------------------------------------------------

    def _check(self, story: Story, commit: Commit, outcome: Tokens, chain: Tokens, q: SparseQ | None) -> None:
        """Compares a chain. The root of a chain on request was read with the text, or fed after it: that makes a
        difference for a head that drafts blocks, whose slots see each other."""
        ways = [(story.text, outcome)]
        if not outcome and len(story.text) - story.first_row > 2:
            ways.append((story.text[:-1], story.text[-1:]))
        faults = [self._find_fault(story, commit, text, given, chain, q) for text, given in ways if chain]
        assert not faults or "" in faults, (story, outcome, chain, faults)

    def _find_fault(
        self, story: Story, commit: Commit, text: list[int], given: Tokens, chain: Tokens, q: SparseQ | None
    ) -> str:
        grammar = RandomGrammar(story.prompt_len) if story.name.endswith("g") else None
        tree: Any = self._fresh.open(text, story.sampling, grammar, story.fan_out)
        try:
            if isinstance(self._fresh, HeadDrafter):
                tree.add_features(story.first_row, self._features(story.text)[story.first_row : -1])
            while tree.committed_len < len(text):
                tree.read(text[tree.committed_len :])
            depth, node = commit.depth, tree.root
            if commit.verifying is not None:
                depth = min(depth, tree.room - len(commit.verifying) - 1)
            for number, token in enumerate(given, 1):
                is_bonus = commit.verifying is not None and number == len(given)
                if is_bonus and self._rank(tree, node, token) > commit.rank_offset + commit.branches + 1:
                    return f"the outcome {token} is unlikely"
                node = self._feed(tree, node, token, depth if number == len(given) else 1)
            for number, token in enumerate(chain):
                fault = self._compare(tree, node, token, q.part(number, number + 1) if q is not None else None)
                if fault:
                    return f"token {number}: {fault}"
                if number < len(chain) - 1:
                    node = self._feed(tree, node, token if token != tree.best([node])[0] else None, 1)
        finally:
            tree.close(discard=True)
        return ""

    def _compare(self, tree: Any, node: int, token: int, q: SparseQ | None) -> str:
        (own,) = tree.best([node])
        self.compared += 1
        if q is not None:
            mine, ids = tree.drawn_from([node]), q.ids[0]
            distance = max(abs(mine.of([other]) - q.of([other]))[0] for other in ids.tolist())
            return "" if own == token and distance < TIE else f"{own} was drawn, at a distance of {distance}"
        scores = np.array(tree.scores(node))
        margin = float(scores.max() - scores[token])
        return "" if own == token or margin < TIE else f"{own} is better by {margin}"

    def _rank(self, tree: Any, node: int, token: int) -> int:
        """The rank of an outcome's last token. That of a block depends on its slots, of which a worker opens fewer."""
        if isinstance(self._fresh, HeadDrafter) and isinstance(self._fresh.head, BlockHead):
            return 0
        scores = np.array(tree.scores(node))
        return int((scores > scores[token] + TIE).sum())

    @staticmethod
    def _feed(tree: Any, node: int, token: int | None, depth: int) -> int:
        ((new,),) = type(tree).feed_together([tree], [TreeFeed([node], [token], [depth])])
        return int(new)


HEADS = {
    "eagle3": random_head,
    "mtp": mtp_head,
    "peagle": parallel_head,
    "redrafter": recurrent_head,
    "dflash": block_head,
    "dspark": gated_head,
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(
    "kind", ["llama", "llama drawn", "gemma3_text", *HEADS, *(f"{name} by ONNX Runtime" for name in ("eagle3", "mtp"))]
)
def test_chains_are_a_fresh_drafters(
    kind: str, seed: int, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, *way = kind.split()
    if name in HEADS:
        target = markov_llama(tmp_path_factory.mktemp("markov"))

        def make() -> Drafter:
            head = HEADS[name](target)  # type: ignore[operator]
            cpu = unrounded(head, target) if way else None
            return HeadDrafter(head, target.vocab_size, cpu=cpu)
    else:

        def make() -> Drafter:
            return MlxDrafter(load(tiny_model(name)))

    stories = Stories(make, DRAWN if way == ["drawn"] else COUPLED, seed)
    stories.run(STEPS)
    assert stories.compared > STEPS / 2 and stories.hits > STEPS / 20
