"""The drafters in the target's process. They draft between two verifies, without messages, and do not work ahead.

A drafter is a draft model (`Drafter`), a head that reads the target's hidden states (`HeadDrafter`), an early
exit of the target (`ExitDrafter`), or n-grams (`NgramDrafter`). One that can't be loaded is left out with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import mlx.core as mx

from outrider.drafters.drafter import Drafter
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.growth import BranchTask, Continuation, without_forwards
from outrider.drafters.heads import load as heads
from outrider.drafters.heads.drafter import HeadDraft, HeadDrafter
from outrider.drafters.heads.early_exit import ExitDraft, ExitDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.ngrams import NgramDraft, NgramDrafter
from outrider.drafters.work_ahead import DraftTurn, WorkAhead
from outrider.engine.hidden_states import HiddenStateReader, HiddenStates
from outrider.engine.kv_cache import CacheSlot, HiddenStatesListener, KVCache
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError
from outrider.protocol.heads import DRAFT_MODEL, NGRAM, unique_names
from outrider.protocol.messages import InProcess, workers
from outrider.protocol.ngrams import NgramTable
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost

_CHAIN_TOKENS = 4  # the default K


class ModelDraftSession:
    """A request of a draft model. Each `turn` first commits the new tokens in the model's tree."""

    def __init__(self, drafter: Drafter, sampling: SamplingParams, constraint: Constraint | None = None) -> None:
        # No outcomes are prepared, so there are no tokens whose weight Saguaro's factor could lower.
        self._sampling = replace(sampling, saguaro=1.0) if sampling.is_residual else sampling
        self._drafter, self._constraint = drafter, constraint
        self._has_begun = False
        self._work: WorkAhead | None = None

    def turn(self, tokens: Sequence[int], task: InProcess) -> DraftTurn:
        """Prepares the draft of `task` after the committed `tokens`, which extend those of the call before.

        Nothing is drafted once the text is longer than the draft model's context.

        Raises:
            DrafterFault: the draft model lacks one of the tokens.
        """
        if len(tokens) >= self._drafter.context_length:
            self.close(discard=False)
        elif not self._has_begun:
            self._has_begun = True  # if it fails, this text gets no drafts
            tree, policy = self._drafter.open(tokens, self._sampling, self._constraint), FAN_OUT_POLICIES["uniform"]
            self._work = WorkAhead(tree, (), policy, self._drafter.calibration, tokens[tree.committed_len :])
        if self._work is None:
            return DraftTurn(without_forwards(Continuation()))
        work, new = self._work, tokens[self._work.committed_len :]
        self._drafter.check_text(new, len(tokens))
        work.commit(new, BranchTask(None, task.depth, min_prob=task.min_prob))
        return DraftTurn(work.continuation(task.depth), work.read if work.must_read else None)

    def close(self, discard: bool) -> None:
        """Ends drafting; the text's state may serve later texts. `discard`: keep nothing, after a failure."""
        work, self._work = self._work, None
        if work is not None:
            work.tree.close(discard)


DraftSession = ModelDraftSession | HeadDraft | NgramDraft


@dataclass(eq=False)
class InProcessDrafters:
    """Any number of drafters, by name. The first one drafts if a round names none.

    `infos` describe them to the orchestrator; `left_out`: a sentence for each that was left out or is weak; `notes`:
    the others' own.
    """

    drafters: Mapping[str, Drafter | NgramDrafter]
    infos: tuple[workers.InProcessDrafter, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def _heads(self) -> dict[str, HeadDrafter]:
        heads = {name: own for name, own in self.drafters.items() if isinstance(own, HeadDrafter)}
        return {name: own for name, own in heads.items() if own.head.points}  # an early exit has none

    @property
    def weight_bytes(self) -> int:
        return sum(proposer.weight_bytes for proposer in self.drafters.values())

    @property
    def cost(self) -> KvCost:
        """The memory of a text in all of them."""
        return sum((cache.cost for cache in self._caches), KvCost())

    @property
    def reads_hidden_states(self) -> bool:
        """True if one of them reads the target's hidden states."""
        return bool(self._heads)

    def attach_heads(self, model: LoadedModel, kv_cache: KVCache, other: Head | None = None) -> None:
        """Connects the heads, and an `other` one after them, to the hidden states of this KV cache."""
        tapped = [*(proposer.head for proposer in self._heads.values()), *([other] if other is not None else [])]
        if tapped:
            readers = (HiddenStateReader(head.points, head.fuse) for head in tapped)
            kv_cache.tap_hidden_states(HiddenStates(model.model, *readers))

    def make_session_openers(
        self,
        slot: CacheSlot,
        sampling: SamplingParams,
        constraint: Callable[[], Constraint | None],
        other: HiddenStatesListener | None = None,
    ) -> dict[str, Callable[[], DraftSession]]:
        """Returns functions that open a request's session in each drafter. Heads get features from the first token on.

        `constraint` creates a constraint for each drafter, since it has a position in the text. `other` listens for the
        other reader.
        """
        drafts = {name: head.open_draft(sampling, constraint()) for name, head in self._heads.items()}
        listeners = [draft.add_features for draft in drafts.values()] + ([other] if other is not None else [])
        if listeners:
            slot.listener = partial(_pass_features, listeners)
        if drafts:
            slot.usable_cached_tokens = partial(_usable_prefix_length, slot, list(drafts.values()))
        sessions: dict[str, Callable[[], DraftSession]] = {}
        for name, proposer in self.drafters.items():
            match proposer:
                case NgramDrafter():
                    sessions[name] = partial(NgramDraft, proposer)
                case ExitDrafter():
                    sessions[name] = partial(
                        ExitDraft, proposer, proposer.sampler(sampling, constraint()), slot.sequence
                    )
                case HeadDrafter():
                    sessions[name] = partial(drafts.__getitem__, name)
                case Drafter():
                    sessions[name] = partial(ModelDraftSession, proposer, sampling, constraint())
        return sessions

    def divide_memory(self, limit: int, context: int, whole: KvCost) -> int:
        """Gives the drafters' prompt caches their shares of `limit` bytes, by their part in `whole`, a text's cost;
        returns the rest."""
        left = limit
        for cache in self._caches:
            share = limit * cache.cost.of(context) // max(whole.of(context), 1)
            cache.set_limit(share)
            left -= share
        return left

    @property
    def _caches(self) -> list[PromptCache]:
        return [own.prompt_cache for own in self.drafters.values() if not isinstance(own, NgramDrafter)]


def _pass_features(listeners: Sequence[HiddenStatesListener], position: int, *features: mx.array) -> None:
    """Passes each head's features to its listener; the other head, which is last, may have none."""
    for listener, own in zip(listeners, features, strict=False):
        listener(position, own)


def _usable_prefix_length(slot: CacheSlot, drafts: Sequence[HeadDraft], length: int) -> int:
    """Returns how many of `length` cached tokens the target may use, so that no head lacks a feature."""
    for _ in range(2):  # twice, so that the first head gets the length that later ones have shortened
        for draft in drafts:
            length = draft.begin(slot.tokens, length, slot.sequence.exact)
    return length


def load(
    wanted: Sequence[tuple[str, str]],
    model: LoadedModel,
    progress: Callable[[str], None],
    unsharded: bool,
    ngrams: str | None = None,
) -> InProcessDrafters:
    """Loads drafters, each a kind (`DRAFT_MODEL` or one of `protocol.heads.HEAD_KINDS`) with the folder of its files.

    `unsharded`: the whole model is in this process (see `drafters.heads.load`). `ngrams`: the file of a table of
    n-grams, "" without one; None: no n-grams. They are used where ONNX Runtime computes: MLX begins a forward before
    the tokens of the one before are known, and n-grams in between would have to wait for them.
    """
    drafters: dict[str, Drafter | NgramDrafter] = {}
    infos, left_out, notes = [], [], []
    for name, (kind, path) in zip(unique_names(kind for kind, _ in wanted), wanted, strict=True):
        try:
            if kind == DRAFT_MODEL:
                drafter: Drafter = MlxDrafter.load(path, progress)
            else:
                drafter = heads.load(kind, path, model, progress, unsharded)
        except OutriderError as error:
            left_out.append(f"drafter {name} is not used: {error}")
            continue
        drafters[name] = drafter
        if drafter.is_weak:
            left_out.append(f"drafter {name}: {drafter.note}")
        elif drafter.note:
            notes.append(drafter.note)
        agreement = -1.0 if drafter.agreement is None else drafter.agreement
        weight = _relative_cost(drafter, model)
        is_head = isinstance(drafter, HeadDrafter)
        infos.append(workers.InProcessDrafter(name, path, is_head, agreement, weight))
    if ngrams is not None and unsharded and model.cpu is not None:
        try:
            drafters[NGRAM] = NgramDrafter(NgramTable.load(ngrams) if ngrams else None)
        except OutriderError as error:
            left_out.append(str(error))
    return InProcessDrafters(drafters, tuple(infos), tuple(left_out), tuple(notes))


def _relative_cost(drafter: Drafter, model: LoadedModel) -> float:
    """Returns the likely cost of a drafted token relative to a step of the target, by the weights that they read.

    ONNX Runtime has the weights of heads and target in about as many bits each. The tokens of a block share a forward.
    """
    if isinstance(drafter, HeadDrafter) and model.cpu is not None:
        ratio: float = drafter.parameters / max(model.parameters, 1)
    else:
        ratio = drafter.weight_bytes / max(model.weight_bytes, 1)
    drafts_blocks = isinstance(drafter, HeadDrafter) and drafter.head.depth is not None
    return ratio / _CHAIN_TOKENS if drafts_blocks else ratio
