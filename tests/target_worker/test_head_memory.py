"""Head and target read only the new part of a conversation's second turn, with the state of a full read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.drafter import HeadDraft, HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.kv_rows import PairKVRows
from outrider.drafters.heads.trees import HeadTree
from outrider.engine.hidden_states import HiddenStateReader, HiddenStates
from outrider.engine.kv_cache import CacheSlot
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.messages import Autonomous, Close, InProcess, KvMemory, Open, Outcome, Prefilled, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters, _usable_prefix_length
from outrider.target_worker.target_request import TargetRequest
from outrider.target_worker.worker import TargetWorker
from tests.drafting import HeadText, draft_chains
from tests.system.links import FakeLink, VirtualClock, run_worker
from tests.target_worker.block_heads import convolving_head, parallel_head
from tests.target_worker.heads import drafter, latent_head, mtp_head, random_head, recurrent_head

Heads = Callable[[LoadedModel], Head]
PROMPT = [(31 * n) % 250 + 2 for n in range(60)]
NEW = [(17 * n) % 250 + 2 for n in range(9)]
LENGTH = 12


class Conversation:
    """A target worker with a head, or without. `cached`: the tokens that the last prompt found in the prompt cache."""

    def __init__(self, model: LoadedModel, head: Head | None, memory: int = 1 << 26) -> None:
        self.model, self.head = model, head
        self.own: HeadDrafter | None = drafter(head, model) if head is not None else None
        self.link = FakeLink("target-0")
        own = InProcessDrafters({"own": self.own}) if self.own else None
        self.worker = TargetWorker(self.link, model, drafters=own)  # type: ignore[arg-type]
        run_worker(self.worker, self.link, [KvMemory(memory)])

    def begin(self, name: str, tokens: Sequence[int]) -> TargetRequest:
        params = SamplingParams(max_tokens=LENGTH, temp=0.8, seed=5)
        opened = Open(name, 0, 0, np.array(tokens, np.int32), params)
        self.answers = run_worker(self.worker, self.link, [opened])
        return self.worker._running[name]

    def generate(self, name: str, draft: int = 3) -> list[int]:
        """Generates a request's text and returns it."""
        running = self.worker._running[name]
        start = len(running.slot.tokens)
        go = Autonomous(LENGTH, InProcess(draft) if self.own and draft else None)
        message = Verify(name, 0, running.round + 1, start, go)
        found = run_worker(self.worker, self.link, [message])
        assert all(isinstance(one, Outcome) for one in found), found
        return running.slot.tokens[start:]

    def turn(self, name: str, tokens: Sequence[int], draft: int = 3) -> list[int]:
        """Runs a whole request and returns all its tokens."""
        running = self.begin(name, tokens)
        self.generate(name, draft)
        text = list(running.slot.tokens)
        run_worker(self.worker, self.link, [Close(name)])
        return text

    @property
    def cached(self) -> int:
        return max((answer.cached for answer in self.answers if isinstance(answer, Prefilled)), default=0)


def draft_of(running: TargetRequest) -> HeadDraft:
    found: Any = next(iter(running._drafting.values()))
    assert isinstance(found, HeadDraft)
    return found


def check_state(chat: Conversation, running: TargetRequest) -> None:
    """Checks that the head's state is that of a head that has read the whole text at once."""
    draft, tokens = draft_of(running), running.slot.tokens
    assert chat.own is not None and chat.head is not None
    known = len(draft.tree.pairs)
    assert known + draft.features.count == len(tokens) - 1 and known > 0
    rows: list[mx.array] = []
    hidden_states = HiddenStates(chat.model.model, HiddenStateReader(chat.head.points, chat.head.fuse))
    hidden_states.forward(lambda: chat.model.model(mx.array([tokens]))[0], [(len(tokens), rows.append)])
    fresh = HeadDrafter(chat.head, chat.model.vocab_size)
    again = fresh.open_draft(SamplingParams())
    again.add_features(0, rows[0][:known])
    draft_chains([HeadText(again, tokens[: known + 1])], [1])
    for mine, true in zip(draft.tree.save(known + 1).layers, again.tree.save(known + 1).layers, strict=True):
        for a, b in zip(mine, true, strict=True):
            assert float(mx.abs(a - b).max().item()) < 1e-3


@pytest.fixture(scope="module")
def plain_turns(target: LoadedModel) -> tuple[list[int], list[int]]:
    """Two turns without a head."""
    chat = Conversation(target, None)
    first = chat.turn("a", PROMPT)
    return first, chat.turn("b", [*first, *NEW])


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of features that the head read at once."""
    counts: list[int] = []
    read, read_many = HeadTree.read_in_steps, HeadDraft._read_pairs

    def counted(self: HeadTree, tokens: Sequence[int], wanted: int = 1) -> Any:
        counts.append(self.kv_rows.features.count)
        return read(self, tokens, wanted)

    def many_counted(self: HeadDraft) -> bool:
        counts.append(self.features.count)
        return read_many(self)

    monkeypatch.setattr(HeadTree, "read_in_steps", counted)
    monkeypatch.setattr(HeadDraft, "_read_pairs", many_counted)
    return counts


@pytest.mark.parametrize("make_head", [mtp_head, latent_head, parallel_head, convolving_head])
def test_second_turn_reads_only_new_tokens_with_the_state_of_a_full_read(
    target: LoadedModel, make_head: Heads, plain_turns: tuple[list[int], list[int]], fed: list[int]
) -> None:
    chat = Conversation(target, make_head(target))
    first = chat.turn("a", PROMPT)
    assert first == plain_turns[0] and fed[0] == len(PROMPT)
    fed.clear()
    running = chat.begin("b", [*first, *NEW])
    assert chat.cached >= len(first) - 2
    chat.generate("b")
    assert running.slot.tokens == plain_turns[1]
    assert fed[0] <= len(NEW) + 3
    check_state(chat, running)


@pytest.mark.parametrize("make_head", [mtp_head, latent_head, parallel_head])
def test_reading_a_prompt_does_not_count_as_drafting_time(
    target: LoadedModel, make_head: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would raise the measured cost of a drafted token."""
    clock, read = VirtualClock(), PairKVRows.read_rest
    monkeypatch.setattr("outrider.protocol.clock.now", clock)

    def read_slowly(self: PairKVRows) -> None:
        clock.skip(1_000_000_000)
        read(self)

    monkeypatch.setattr(PairKVRows, "read_rest", read_slowly)
    chat = Conversation(target, make_head(target))
    chat.begin("a", PROMPT)
    go = Verify("a", 0, 1, len(PROMPT) + 1, Autonomous(LENGTH, InProcess(3)))
    drafted = [one.drafted for one in run_worker(chat.worker, chat.link, [go]) if one.drafted is not None]
    assert clock() > 1_000_000_000 and max(draft.span.milliseconds for draft in drafted) < 500
    assert all(len(draft.chain) == 3 for draft in drafted[:2])
    check_state(chat, chat.worker._running["a"])


def test_changed_turn_is_read_from_the_change_on(target: LoadedModel, fed: list[int]) -> None:
    """The target reads one token again, whose row the head lacks."""
    chat = Conversation(target, mtp_head(target))
    first = chat.turn("a", PROMPT)
    fed.clear()
    running = chat.begin("b", [*first[:40], *NEW])
    assert chat.cached == 39
    chat.generate("b")
    assert fed[0] <= len(NEW) + 3
    check_state(chat, running)


def test_request_reuses_the_head_state_of_a_running_request(target: LoadedModel, fed: list[int]) -> None:
    chat = Conversation(target, mtp_head(target))
    chat.begin("a", PROMPT)
    chat.generate("a")
    fed.clear()
    running = chat.begin("b", [*PROMPT, *NEW])
    chat.generate("b")
    assert fed[0] <= len(NEW) + 3
    check_state(chat, running)


def test_target_rereads_nothing_when_the_head_has_read_nothing(target: LoadedModel) -> None:
    """A text without drafts costs the head nothing; in the next text it begins after the gap."""
    chat = Conversation(target, mtp_head(target))
    first = chat.turn("a", PROMPT, draft=0)
    running = chat.begin("b", [*first, *NEW])
    assert chat.cached == len(first) - 1
    chat.generate("b")
    assert len(draft_of(running).tree.pairs) < len(NEW) + LENGTH + 3


def test_head_state_of_a_failed_request_is_not_kept(target: LoadedModel) -> None:
    chat = Conversation(target, mtp_head(target))
    running = chat.begin("a", PROMPT)
    chat.generate("a")
    assert chat.own is not None
    chat.worker._close("a", discard=True)
    assert chat.own.prompt_cache.use.entries == 0 and running.is_closed


def test_head_without_keys_and_values_keeps_no_entries(target: LoadedModel) -> None:
    chat = Conversation(target, recurrent_head(target))
    first = chat.turn("a", PROMPT)
    running = chat.begin("b", [*first, *NEW])
    assert chat.cached == len(first) - 1 and chat.own is not None and chat.own.prompt_cache.use.entries == 0
    assert chat.generate("b") and draft_of(running).features.count == 1


def test_indivisible_state_is_reused_when_the_head_has_all_of_it(tiny_model: Callable[..., Path]) -> None:
    """A recurrent target can't go back to an earlier state, so the head must have read as much."""
    model = load(tiny_model("qwen3_next"))
    chat = Conversation(model, random_head(model))
    first = chat.turn("a", PROMPT)
    running = chat.begin("b", [*first, *NEW])
    assert chat.cached == len(first) - 1
    chat.generate("b")
    check_state(chat, running)


def test_prompt_cache_of_a_head_stays_within_its_limit(target: LoadedModel) -> None:
    chat = Conversation(target, mtp_head(target), memory=1 << 17)
    for number in range(3):
        chat.turn(str(number), [(t + number) % 250 + 2 for t in PROMPT])
    assert chat.own is not None
    cache = chat.own.prompt_cache
    assert 0 < cache.use.bytes <= cache._limit and not chat.own.kv_cache._sequences  # type: ignore[attr-defined]


def test_target_rereads_the_rows_that_any_of_several_heads_lacks(target: LoadedModel) -> None:
    """Here the first head has read 50 tokens of the text, the second 45, and the third none."""
    slot = CacheSlot(target, open_kv_cache(target), [*PROMPT, *NEW], SamplingParams())
    own = [drafter(mtp_head(target), target) for _ in range(3)]
    for head, known in zip(own, (50, 45, 0), strict=True):
        head.prompt_cache.set_limit(1 << 20)
        if known:
            draft = head.open_draft(SamplingParams())
            draft.add_features(0, mx.ones((known, 64)))
            draft_chains([HeadText(draft, PROMPT[: known + 1])], [1])
            draft.close(discard=False)
    drafts = [head.open_draft(SamplingParams()) for head in own]
    assert _usable_prefix_length(slot, drafts, 52) == 45
    for draft in drafts:
        draft.add_features(45, mx.ones((4, 64)))
    for draft, length in zip(drafts, (49, 49, 4), strict=True):
        draft_chains([HeadText(draft, slot.tokens[:50])], [1])
        assert len(draft.tree.pairs) == length
