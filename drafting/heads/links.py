"""What binds the tokens of a block together: each slot's candidates are scored anew once the token before is known.

A block's slots are drafted at once and know nothing of each other's choice. DSpark (arXiv 2607.05147) adds a product of
low rank of the token before and the token to come, DFlash2's selector one that looks at the slot's vector, too. Along
a walk both are asked about a few candidates only; the selector never looks at more than `FEW`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from outrider.drafting.heads.vocabulary import DraftVocabulary

FEW = 16


class Link(Protocol):
    """Arrays: R rows, C candidates of each, H the width of hidden vectors."""

    def begin(self, rows: int) -> mx.array:
        """What it remembers of so many chains before their first token, [R, ...]."""
        ...

    def __call__(
        self, before: mx.array, hidden: mx.array, candidates: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What candidates [R, C] gain behind tokens `before` [R] in slots of these vectors [R, H], in logits [R, C].

        And what it remembers then.
        """
        ...

    @property
    def recalls(self) -> bool:
        """Whether what it says depends on more of the chain than the token before."""
        ...

    def over(self, logits: mx.array, before: mx.array, hidden: mx.array) -> mx.array:
        """Logits [R, V] behind tokens `before` [R] of what these slots say alone; -inf for what it does not look at.

        Of one that recalls nothing.
        """
        ...

    def odds(self, before: mx.array, hidden: mx.array) -> mx.array | None:
        """The chance [R] that what such slots draft holds where the token before does, if it can tell."""
        ...


class Markov(nn.Module):  # type: ignore[misc]
    """DSpark's head: `kind` vanilla, gated (the slot's vector opens it) or rnn (it knows the chain so far)."""

    def __init__(self, kind: str, rank: int, size: int, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self._kind, self._rank, self._vocabulary = kind, rank, vocabulary
        self.markov_w1 = nn.Embedding(vocabulary.size, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary.known, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def begin(self, rows: int) -> mx.array:
        return mx.zeros((rows, self._rank), self.markov_w2.weight.dtype)

    @property
    def recalls(self) -> bool:
        return self._kind == "rnn"

    def over(self, logits: mx.array, before: mx.array, hidden: mx.array) -> mx.array:
        found, _ = self._found(self.markov_w1(before), hidden, self.begin(before.shape[0]))
        return logits + self._vocabulary.spread(self.markov_w2(found).astype(mx.float32))

    def odds(self, before: mx.array, hidden: mx.array) -> mx.array | None:
        return None

    def __call__(
        self, before: mx.array, hidden: mx.array, candidates: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        found, memory = self._found(self.markov_w1(before), hidden, memory)
        return (self.markov_w2.weight[self._vocabulary.own(candidates)] @ found[..., None])[..., 0].astype(
            mx.float32
        ), memory

    def _found(self, known: mx.array, hidden: mx.array, memory: mx.array) -> tuple[mx.array, mx.array]:
        if self._kind == "gated":
            return mx.sigmoid(self.gate_proj(mx.concatenate([hidden, known], axis=-1))) * known, memory
        if self._kind == "rnn":
            gate, new, out = mx.split(self.joint_proj(mx.concatenate([memory, known, hidden], axis=-1)), 3, axis=-1)
            kept = mx.sigmoid(gate)
            return mx.tanh(out), kept * memory + (1 - kept) * mx.tanh(new)
        return known, memory


class Selector(nn.Module):  # type: ignore[misc]
    """DFlash2's: a token fits behind another as far as the slot's vector lets their codes meet."""

    def __init__(self, rank: int, size: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = mx.zeros((vocab_size, rank))
        self.successor_codebook = mx.zeros((vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def begin(self, rows: int) -> mx.array:
        return mx.zeros((rows, 0))

    def __call__(
        self, before: mx.array, hidden: mx.array, candidates: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        wanted = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return _products(self.successor_codebook[candidates], wanted), memory

    @property
    def recalls(self) -> bool:
        return False

    def over(self, logits: mx.array, before: mx.array, hidden: mx.array) -> mx.array:
        few = mx.argpartition(-logits, kth=FEW - 1, axis=-1)[:, :FEW]
        gains, _ = self(before, hidden, few, hidden)
        found = mx.take_along_axis(logits, few, axis=-1) + gains
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), few, found, axis=-1)

    def odds(self, before: mx.array, hidden: mx.array) -> mx.array | None:
        return None


class Confidence(nn.Module):  # type: ignore[misc]
    """DSpark's: the chance that a slot's token holds, by its vector and `rank` numbers of the token before."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size + rank, 1)


@dataclass(frozen=True, slots=True)
class Confident:
    """A Markov head whose `confidence` is known. `sees`: it sees the token before."""

    markov: Markov
    confidence: Confidence
    sees: bool

    def begin(self, rows: int) -> mx.array:
        return self.markov.begin(rows)

    @property
    def recalls(self) -> bool:
        return self.markov.recalls

    def over(self, logits: mx.array, before: mx.array, hidden: mx.array) -> mx.array:
        return self.markov.over(logits, before, hidden)

    def __call__(
        self, before: mx.array, hidden: mx.array, candidates: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        return self.markov(before, hidden, candidates, memory)

    def odds(self, before: mx.array, hidden: mx.array) -> mx.array | None:
        seen = mx.concatenate([hidden, self.markov.markov_w1(before)], axis=-1) if self.sees else hidden
        return mx.sigmoid(self.confidence.proj(seen)[:, 0].astype(mx.float32))


def _products(codes: mx.array, wanted: mx.array) -> mx.array:
    """[R, C] of codes [R, C, rank] with what is wanted [R, rank]."""
    return (codes @ wanted[..., None])[..., 0].astype(mx.float32)
