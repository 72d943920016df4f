"""What binds the tokens of a block together: each slot's candidates are scored anew once the token before is known.

A block's slots are drafted at once and know nothing of each other's choice. DSpark (arXiv 2607.05147) adds a product of
low rank of the token before and the token to come, DFlash2's selector one that looks at the slot's vector, too. Both
are asked about a few candidates only.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from outrider.drafting.heads.vocabulary import DraftVocabulary


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

    def embedded(self, before: mx.array) -> mx.array:
        """[R, rank]."""
        found: mx.array = self.markov_w1(before)
        return found

    def __call__(
        self, before: mx.array, hidden: mx.array, candidates: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        found, memory = self._found(self.embedded(before), hidden, memory)
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


class Confidence(nn.Module):  # type: ignore[misc]
    """DSpark's: the chance that a slot's token holds, once those before it did."""

    def __init__(self, size: int, rank: int) -> None:
        """`rank`: of what it sees of the token before; 0: nothing."""
        super().__init__()
        self._rank = rank
        self.proj = nn.Linear(size + rank, 1)

    def __call__(self, hidden: mx.array, known: mx.array) -> mx.array:
        """[R] of vectors [R, H] and what is known of the tokens before [R, rank]."""
        seen = mx.concatenate([hidden, known], axis=-1) if self._rank else hidden
        return mx.sigmoid(self.proj(seen)[:, 0].astype(mx.float32))


def _products(codes: mx.array, wanted: mx.array) -> mx.array:
    """[R, C] of codes [R, C, rank] with what is wanted [R, rank]."""
    return (codes @ wanted[..., None])[..., 0].astype(mx.float32)
