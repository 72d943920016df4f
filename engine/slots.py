"""A request's place in the target: its committed tokens and what the model remembers of them.

Knows tokens and logits; nothing of sockets, text or who proposes chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from outrider.engine.abilities import abilities
from outrider.engine.cache import KVState
from outrider.engine.loading import LoadedModel
from outrider.engine.residual import target_sampler
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

_PREFILL = 512  # tokens a forward while a prompt is read


class Slot:
    """`tokens` are committed; the model has been fed the first `fed` of them, always fewer than all between calls."""

    def __init__(self, model: LoadedModel, tokens: Sequence[int], params: SamplingParams) -> None:
        """
        Raises:
            InvalidRequest: no tokens, or a token the model doesn't have.
        """
        if not tokens:
            raise InvalidRequest("the prompt has no tokens; expected at least one")
        if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
            raise InvalidRequest(f"a prompt token is outside 0..{model.vocab_size - 1}, the model's vocabulary")
        self.tokens = list(tokens)
        self.sampler = target_sampler(params, model.vocab_size)
        self.kv = KVState(model.model, abilities(model).own_caches)
        self._model = model.model

    @property
    def fed(self) -> int:
        return self.kv.length

    @property
    def unfed(self) -> list[int]:
        """The committed tokens the next forward must begin with; at least one."""
        return self.tokens[self.fed :]

    def forward(self, tokens: mx.array) -> mx.array:
        """Feeds tokens [N] behind what was fed; returns their logits [N, V]. Lazy."""
        logits: mx.array = self._model(tokens[None], cache=self.kv.caches)
        self.kv.length += tokens.shape[0]
        return logits[0]

    def feed_all_but(self, rest: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Feeds committed tokens, evaluated, until only the last `rest` are unfed. `progress(done, total)` if long."""
        total = len(self.tokens) - rest
        long = total - self.fed > _PREFILL
        while self.fed < total:
            chunk = self.tokens[self.fed : min(self.fed + _PREFILL, total)]
            self.forward(mx.array(chunk))
            mx.eval(self.kv.state)
            mx.clear_cache()
            if long and progress is not None:
                progress(self.fed, len(self.tokens))


def open_slots(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    progress: Callable[[int, int], None] | None = None,
) -> list[Slot]:
    """Makes a slot a prompt and feeds all of it but the last token, in chunks.

    Args:
        progress: called as (tokens done, tokens in all) after each chunk of a long prompt; may raise to end the call.

    Raises:
        InvalidRequest: a prompt is empty or has tokens outside the vocabulary.
    """
    slots = [Slot(model, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
    for slot in slots:
        slot.feed_all_but(1, progress)
    return slots
