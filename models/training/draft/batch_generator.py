"""Generates the target's answers to prompts by continuous batching: a slot that becomes free takes the next prompt.

A prompt is prefilled once and answered at each of its temperatures. If it is open, the target completes the user's
message first. The target's most likely tokens are recorded at every position that it generates, and at every position
of text that is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from models.training.draft.store import Sample
from models.training.llama import Llama, decode_attention, sample, top_log_probs
from models.training.loop import autocast

_MESSAGE_TEMP = 0.8  # of the rest of an open message
_MAX_MESSAGE_TOKENS = 256
_GROUP = 16  # slots that attend together, padded to the longest of them


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt in tokens, to answer at each of `temps` with up to `max_tokens` tokens. Without `temps` it is text that
    is only read. With a `suffix` it is the beginning of a user's message, and the suffix leads from the end of the
    message to the answer."""

    number: int
    kind: str
    temps: tuple[float, ...]
    tokens: list[int]
    max_tokens: int
    suffix: tuple[int, ...] = ()


@dataclass(slots=True)
class _Sequence:
    """An answer in progress. `in_message`: the target still completes the user's message; `forced`: tokens that come
    next; `start`: the position of the first token of the answer, or of the rest of the message."""

    prompt: TokensPrompt
    answer_temp: float
    tokens: list[int]
    in_message: bool = field(init=False)
    forced: list[int] = field(default_factory=list)
    start: int = field(init=False)
    ids: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.in_message, self.start = bool(self.prompt.suffix), len(self.tokens)

    @property
    def temp(self) -> float:
        return _MESSAGE_TEMP if self.in_message else self.answer_temp

    def append(self, token: int, eos: frozenset[int]) -> None:
        """Appends the sampled token, or the forced one."""
        if self.in_message and (token in eos or len(self.tokens) - self.start >= _MAX_MESSAGE_TOKENS):
            self.in_message, self.forced = False, list(self.prompt.suffix)
            self.start = len(self.tokens) + len(self.forced)
        self.tokens.append(self.forced.pop(0) if self.forced else token)

    def is_finished(self, eos: frozenset[int], length: int) -> bool:
        if len(self.tokens) >= length:
            return True
        answered = len(self.tokens) - self.start
        return not self.in_message and answered > 0 and (self.tokens[-1] in eos or answered > self.prompt.max_tokens)

    def result(self) -> Sample:
        prompt, ids, log_probs = self.prompt, torch.cat(self.ids), torch.cat(self.log_probs)
        prompt_length = len(prompt.tokens)
        length = prompt_length - 1 + len(ids) if prompt.temps else len(ids)
        tokens = torch.tensor(self.tokens[:length], dtype=torch.int32)
        return Sample(prompt.number, prompt.kind, self.answer_temp, prompt_length, tokens, ids, log_probs)


class _LayerCache:
    """The KV cache of one layer, with a row of `length` tokens for each slot. A forward is either the prefill of one
    prompt, in row `prefilled`, or one token of every slot, at `positions`."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # [slots, kv_heads, length, head_dim]
        self.values = torch.zeros_like(self.keys)
        self.prefilled = 0
        self.positions = torch.empty(0, dtype=torch.long)
        self.masks: list[Tensor] = []  # [slots, 1, 1, length] of each group of slots, to be added

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if keys.shape[2] > 1:
            self.keys[self.prefilled, :, : keys.shape[2]] = keys[0]
            self.values[self.prefilled, :, : keys.shape[2]] = values[0]
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        slots = torch.arange(len(self.keys), device=self.keys.device)
        self.keys[slots, :, self.positions] = keys[:, :, 0]
        self.values[slots, :, self.positions] = values[:, :, 0]
        groups = zip(queries.split(_GROUP), self.keys.split(_GROUP), self.values.split(_GROUP), self.masks, strict=True)
        return torch.cat([
            decode_attention(q, k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]], mask) for q, k, v, mask in groups
        ])  # fmt: skip

    def copy_prompt(self, source: int, slot: int, length: int) -> None:
        """Copies the first `length` tokens of a slot to another one."""
        self.keys[slot, :, :length] = self.keys[source, :, :length]
        self.values[slot, :, :length] = self.values[source, :, :length]


class BatchGenerator:
    """Answers prompts in `slots` slots of `length` tokens. `eos`: the tokens that end an answer; `top`: the number of
    likely tokens that are recorded per position."""

    def __init__(self, model: Llama, *, slots: int, length: int, eos: frozenset[int], top: int, seed: int) -> None:
        self._model, self._length, self._eos, self._top = model, length, eos, top
        self._device, self._dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
        shape = (slots, model.shape.kv_heads, length, model.shape.head_dim)
        self._caches = [_LayerCache(shape, self._dtype, self._device) for _ in range(model.shape.layers)]
        self._slots: list[_Sequence | None] = [None] * slots
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @torch.no_grad()
    def samples(self, next_prompt: Callable[[], TokensPrompt | None]) -> Iterator[Sample]:
        """Yields samples as they finish, until `next_prompt` returns None and all slots are free."""
        prompt = next_prompt()
        while prompt is not None or any(self._slots):
            while prompt is not None:
                free = [number for number, sequence in enumerate(self._slots) if sequence is None]
                if len(free) < max(1, len(prompt.temps)):
                    break
                if len(prompt.tokens) > self._length // 4:  # long prompts share groups: less padding for short ones
                    free.reverse()
                sequences = self._prefill(free, prompt)
                if not prompt.temps:
                    yield sequences[0].result()
                for number, sequence in zip(free, sequences, strict=False):
                    self._slots[number] = sequence if prompt.temps else None
                prompt = next_prompt()
            if any(self._slots):
                self._decode()
            for number, sequence in enumerate(self._slots):
                if sequence is not None and sequence.is_finished(self._eos, self._length):
                    yield sequence.result()
                    self._slots[number] = None

    def _prefill(self, free: list[int], prompt: TokensPrompt) -> list[_Sequence]:
        """Reads a prompt into the first free slot, and samples the first tokens of its answers."""
        for cache in self._caches:
            cache.prefilled = free[0]
        tokens = torch.tensor([prompt.tokens], device=self._device)
        temps = prompt.temps or (0.0,)
        with autocast(self._device, self._dtype):
            hidden = self._model.hidden_states(tokens, 0, self._caches)[-1][0]
            logits = self._model.logits(hidden[-1:] if prompt.temps else hidden).float()
        sequences = [_Sequence(prompt, temp, list(prompt.tokens)) for temp in temps]
        self._record(sequences, logits.expand(len(sequences), *logits.shape))
        for slot in free[1 : len(temps)]:
            for cache in self._caches:
                cache.copy_prompt(free[0], slot, len(prompt.tokens))
        if prompt.temps:
            self._append(sequences, logits.repeat(len(temps), 1))
        return sequences

    def _decode(self) -> None:
        """Generates one token in every slot that is in use. The others compute an arbitrary token."""
        used = [number for number, sequence in enumerate(self._slots) if sequence is not None]
        sequences = [sequence for sequence in self._slots if sequence is not None]
        lengths = torch.tensor([len(s.tokens) if s is not None else 1 for s in self._slots], device=self._device)
        masks = [_padding_mask(group, self._dtype) for group in lengths.split(_GROUP)]
        for cache in self._caches:
            cache.positions, cache.masks = lengths - 1, masks
        last = torch.tensor([[s.tokens[-1] if s is not None else 0] for s in self._slots], device=self._device)
        with autocast(self._device, self._dtype):
            hidden = self._model.hidden_states(last, lengths - 1, self._caches)[-1]
            logits = self._model.logits(hidden[used])[:, 0].float()
        self._record(sequences, logits[:, None])
        self._append(sequences, logits)

    def _record(self, sequences: list[_Sequence], logits: Tensor) -> None:
        """Records the likely tokens of logits [sequences, positions, vocab]."""
        ids, log_probs = top_log_probs(logits, self._top)
        for sequence, *top in zip(sequences, ids.int().cpu(), log_probs.half().cpu(), strict=True):
            sequence.ids.append(top[0])
            sequence.log_probs.append(top[1])

    def _append(self, sequences: list[_Sequence], logits: Tensor) -> None:
        temps = torch.tensor([sequence.temp for sequence in sequences], device=self._device)
        for sequence, token in zip(sequences, sample(logits, temps, self._generator).tolist(), strict=True):
            sequence.append(token, self._eos)


def _padding_mask(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask [slots, 1, 1, longest] to be added, -inf after each length. A CPU adds floats faster than it
    applies booleans."""
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    mask = torch.zeros(len(lengths), len(positions), dtype=dtype, device=lengths.device)
    return mask.masked_fill_(positions >= lengths[:, None], -torch.inf)[:, None, None]
