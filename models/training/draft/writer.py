"""Lets the target answer prompts in a batch of slots; a free slot takes the next prompt (continuous batching).

A prompt is read once and answered at each of its temperatures. If it is open, the target completes the user's message
first. The likeliest tokens are recorded at every position that the target writes, and of text that is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.training.draft.store import Answer
from models.training.llama import Llama, attend_one


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt's tokens, to answer at each of `temps` with up to `limit` tokens; without `temps` it is only read. With
    `follows` the prompt is the beginning of a message; these tokens lead from its end to the answer."""

    number: int
    kind: str
    temps: tuple[float, ...]
    tokens: list[int]
    limit: int
    follows: tuple[int, ...] = ()


@dataclass(slots=True)
class _Slot:
    """An answer in progress; `is_open` while the target completes the message, `forced` tokens come next."""

    question: Question
    answer_temp: float
    tokens: list[int]
    is_open: bool = field(init=False)
    forced: list[int] = field(default_factory=list)
    begun: int = field(init=False)  # position of the answer's first token
    ids: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_open, self.begun = bool(self.question.follows), len(self.tokens)

    @property
    def temp(self) -> float:
        return _MESSAGE_TEMP if self.is_open else self.answer_temp

    def add(self, token: int, end: frozenset[int]) -> None:
        """Adds the token that the target chose, or the one that has to come here."""
        if self.is_open and (token in end or len(self.tokens) - self.begun >= _LONGEST_MESSAGE):
            self.is_open, self.forced = False, list(self.question.follows)
            self.begun = len(self.tokens) + len(self.forced)
        self.tokens.append(self.forced.pop(0) if self.forced else token)

    def is_done(self, end: frozenset[int], length: int) -> bool:
        if len(self.tokens) >= length:
            return True
        written = len(self.tokens) - self.begun
        return not self.is_open and written > 0 and (self.tokens[-1] in end or written > self.question.limit)

    def answer(self) -> Answer:
        question, count = self.question, sum(len(ids) for ids in self.ids)
        ids, log_probs, given = torch.cat(self.ids), torch.cat(self.log_probs), len(question.tokens)
        length = given - 1 + count if question.temps else count
        tokens = torch.tensor(self.tokens[:length], dtype=torch.int32)
        return Answer(question.number, question.kind, self.answer_temp, given, tokens, ids, log_probs)


_MESSAGE_TEMP = 0.8
_LONGEST_MESSAGE = 256
_GROUP = 16  # slots that attend together, padded to the longest of them


class _Room:
    """A layer's KV cache of all slots."""

    def __init__(self, room: Tensor) -> None:
        self.room = room  # [2, slots, kv_heads, length, head_dim]
        self.rows = self.lengths = torch.empty(0, dtype=torch.long)
        self.masks: list[Tensor] = []  # [slots, 1, 1, length] of each group of slots, to be added

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if keys.shape[2] > 1:  # a prompt, alone in its slot
            row = int(self.rows[0])
            self.room[0, row, :, : keys.shape[2]] = keys[0]
            self.room[1, row, :, : keys.shape[2]] = values[0]
            return torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        self.room[0, self.rows, :, self.lengths] = keys[:, :, 0]
        self.room[1, self.rows, :, self.lengths] = values[:, :, 0]
        mixed = [
            attend_one(own, keys[:, :, : mask.shape[-1]], values[:, :, : mask.shape[-1]], mask)
            for own, keys, values, mask in zip(
                queries.split(_GROUP), self.room[0].split(_GROUP), self.room[1].split(_GROUP), self.masks, strict=True
            )
        ]
        return torch.cat(mixed)


class Writer:
    """Answers questions in `slots` slots of `length` tokens. `end`: the tokens that end an answer."""

    def __init__(self, model: Llama, *, slots: int, length: int, end: frozenset[int], top: int, seed: int) -> None:
        self._model, self._length, self._end, self._top = model, length, end, top
        self._device = next(model.parameters()).device
        self._dtype = model.embed_tokens.weight.dtype
        shape = (2, slots, model.shape.kv_heads, length, model.shape.head_dim)
        self._rooms = [
            _Room(torch.zeros(shape, dtype=self._dtype, device=self._device)) for _ in range(model.shape.layers)
        ]
        self._slots: list[_Slot | None] = [None] * slots
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @torch.no_grad()
    def answers(self, question: Callable[[], Question | None]) -> Iterator[Answer]:
        """Yields answers in the order of their ends, until `question` returns None and all slots are empty."""
        asked = question()
        while asked is not None or any(self._slots):
            while asked is not None:
                free = [row for row, slot in enumerate(self._slots) if slot is None]
                if len(free) < max(1, len(asked.temps)):
                    break
                if len(asked.tokens) > self._length // 4:  # long prompts share groups: less padding for short ones
                    free.reverse()
                begun = self._begin(free, asked)
                if not asked.temps:
                    yield begun[0].answer()
                for row, slot in zip(free, begun, strict=False):
                    self._slots[row] = slot if asked.temps else None
                asked = question()
            if any(self._slots):
                self._step()
            for row, slot in enumerate(self._slots):
                if slot is not None and slot.is_done(self._end, self._length):
                    yield slot.answer()
                    self._slots[row] = None

    def _begin(self, free: list[int], question: Question) -> list[_Slot]:
        """Reads a prompt into the first free slot, and samples the first tokens of its answers."""
        for room in self._rooms:
            room.rows = torch.tensor(free[:1])
        tokens = torch.tensor([question.tokens], device=self._device)
        temps = question.temps or (0.0,)
        with self._autocast():
            hidden = self._model.rows(tokens, 0, self._rooms)[-1][0]
            logits = self._model.logits(hidden[-1:] if question.temps else hidden).float()
        slots = [_Slot(question, temp, list(question.tokens)) for temp in temps]
        self._keep(slots, logits.expand(len(slots), *logits.shape))
        for row in free[1 : len(temps)]:
            for room in self._rooms:
                room.room[:, row, :, : len(question.tokens)] = room.room[:, free[0], :, : len(question.tokens)]
        if question.temps:
            self._extend(slots, logits.repeat(len(temps), 1))
        return slots

    def _step(self) -> None:
        rows = [row for row, slot in enumerate(self._slots) if slot is not None]
        slots = [slot for slot in self._slots if slot is not None]
        lengths = torch.tensor([1 if slot is None else len(slot.tokens) for slot in self._slots], device=self._device)
        masks = [_mask(of, self._dtype) for of in lengths.split(_GROUP)]
        for room in self._rooms:  # an empty slot computes an arbitrary token
            room.rows, room.lengths = torch.arange(len(self._slots), device=self._device), lengths - 1
            room.masks = masks
        last = torch.tensor([[0 if s is None else s.tokens[-1]] for s in self._slots], device=self._device)
        with self._autocast():
            hidden = self._model.rows(last, lengths - 1, self._rooms)[-1]
            logits = self._model.logits(hidden[rows])[:, 0].float()
        self._keep(slots, logits[:, None])
        self._extend(slots, logits)

    def _extend(self, slots: list[_Slot], logits: Tensor) -> None:
        temps = torch.tensor([slot.temp for slot in slots], device=self._device)
        for slot, token in zip(slots, self._choose(logits, temps).tolist(), strict=True):
            slot.add(token, self._end)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def _keep(self, slots: list[_Slot], logits: Tensor) -> None:
        best = logits.topk(self._top, dim=-1)
        ids = best.indices.int().cpu()
        log_probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).half().cpu()
        for slot, row_ids, row_log_probs in zip(slots, ids, log_probs, strict=True):
            slot.ids.append(row_ids)
            slot.log_probs.append(row_log_probs)

    def _choose(self, logits: Tensor, temps: Tensor) -> Tensor:
        """Samples at each row's temperature; the best token at 0."""
        chosen = logits.argmax(dim=-1)
        warm = temps > 0
        if bool(warm.any()):
            probabilities = (logits[warm] / temps[warm, None]).softmax(dim=-1)
            sums = probabilities.double().cumsum(dim=-1)
            drawn = torch.rand(len(sums), 1, dtype=sums.dtype, device=self._device, generator=self._generator)
            places = torch.searchsorted(sums, drawn * sums[:, -1:], right=True)
            chosen[warm] = places[:, 0].clamp(max=sums.shape[1] - 1)
        return chosen


def _mask(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what hides the rows behind each length [slots, 1, 1, longest]. A CPU adds floats faster than it applies
    booleans."""
    rows = torch.arange(int(lengths.max()), device=lengths.device)
    hidden = torch.zeros(len(lengths), len(rows), dtype=dtype, device=lengths.device)
    return hidden.masked_fill_(rows >= lengths[:, None], -torch.inf)[:, None, None]
