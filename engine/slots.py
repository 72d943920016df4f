"""A request's place in the target: its committed tokens, how it chooses the next, and what the model remembers of them.

Knows tokens; nothing of sockets, words or who proposes chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from outrider.engine.abilities import abilities
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import Saved, Start
from outrider.engine.residual import target_sampler
from outrider.engine.texts import Feed, SeparateTexts, Texts
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

PREFILL = 512  # tokens a forward while a prompt is read

Listener = Callable[[int, mx.array], None]
"""Hears the hidden rows [R, W] of committed tokens, lazy or not, and the position of the first."""


class Slot:
    """`tokens` are committed; the model has been fed the first `fed` of them, always fewer than all between calls.

    `listener` hears the hidden rows of what batches feed of them (`engine.verify`), where the texts are tapped;
    `begins_at` is asked which of so many remembered tokens are enough for it, since it hears of the others only.
    """

    def __init__(
        self,
        model: LoadedModel,
        texts: Texts,
        tokens: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> None:
        """`constraint`: what the text's grammar allows, if it has one.

        Raises:
            InvalidRequest: no tokens, or a token the model doesn't have.
        """
        if not tokens:
            raise InvalidRequest("the prompt has no tokens; expected at least one")
        if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
            raise InvalidRequest(f"a prompt token is outside 0..{model.vocab_size - 1}, the model's vocabulary")
        self.tokens = list(tokens)
        self.sampler = target_sampler(params, model.vocab_size, constraint)
        self.texts = texts
        self.text: Any = texts.open()
        self.listener: Listener | None = None
        self.begins_at: Callable[[int], int] | None = None

    @property
    def fed(self) -> int:
        return int(self.text.length)

    @property
    def unfed(self) -> list[int]:
        """The committed tokens the next forward must begin with; at least one."""
        return self.tokens[self.fed :]

    def forward(self, tokens: Sequence[int]) -> mx.array:
        """Feeds tokens behind what was fed; returns their logits [N, V]. Lazy."""
        return self.texts.forward([Feed(self.text, tokens, len(tokens))])

    def feed_all_but(self, rest: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Feeds committed tokens, evaluated, until only the last `rest` are unfed. `progress(done, total)` if long."""
        total = len(self.tokens) - rest
        long = total - self.fed > PREFILL
        while self.fed < total:
            self.texts.forward([Feed(self.text, self.tokens[self.fed : min(self.fed + PREFILL, total)], 0, True)])
            mx.eval(self.texts.state())
            mx.clear_cache()
            if long and progress is not None:
                progress(self.fed, len(self.tokens))

    def begin(self, start: Start) -> None:
        """Has what another text has left of its first tokens, instead of reading them; fewer, where rows are wanted."""
        if self.begins_at is not None:
            start = replace(start, length=self.begins_at(start.length))
        self.texts.adopt(self.text, start)

    def lendable(self) -> list[int]:
        """See `prompt_cache.Source`: none where the model's state can't be cut."""
        return self.tokens[: self.fed] if self.text.exact else []

    def save(self, length: int) -> Saved:
        """See `prompt_cache.Source`; of fewer tokens where the model's state can't be cut. Raises RollbackError."""
        return self.texts.save(self.text, length)

    def close(self) -> None:
        """Gives its place back."""
        self.texts.close(self.text)


def open_slots(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    progress: Callable[[int, int], None] | None = None,
    texts: Texts | None = None,
) -> list[Slot]:
    """Makes a slot a prompt and feeds all of it but the last token, in chunks.

    Args:
        progress: called as (tokens done, tokens in all) after each chunk of a long prompt; may raise to end the call.
        texts: where they are held; None: each by itself.

    Raises:
        InvalidRequest: a prompt is empty or has tokens outside the vocabulary.
    """
    held = texts or SeparateTexts(model.model, abilities(model).own_caches)
    slots = [Slot(model, held, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
    for slot in slots:
        slot.feed_all_but(1, progress)
    return slots
