"""The correct results whatever the network does: the target's text alone, and a fresh drafter's proposals."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.engine.kv_cache import CacheSlot
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.engine.verify import verify
from outrider.protocol.sampling import SamplingParams
from tests.slots import open_slots

_KEPT = 20_000


class Text:
    """The endless text of the target alone after a prompt, one token a step."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._slot: CacheSlot = open_slots(model, [prompt], [sampling])[0]

    def first(self, count: int) -> list[int]:
        """Returns the first `count` tokens, prompt included."""
        while len(self._slot.tokens) < count:
            verify(self._slot)
        return self._slot.tokens[:count]


class FreshDrafter:
    """A drafter without state, for models of tests.system.markov: each forward is over the last token only."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._samplers: dict[SamplingParams, Sampler] = {}
        self._known: dict[tuple[SamplingParams, int, tuple[int, ...]], int] = {}

    def propose(self, text: Sequence[int], count: int, sampling: SamplingParams) -> list[int]:
        """Returns the `count` tokens after `text`."""
        tokens = list(text)
        for _ in range(count):
            tokens.append(self._next(tokens, sampling))
        return tokens[len(text) :]

    def _next(self, text: Sequence[int], sampling: SamplingParams) -> int:
        sampler = self._samplers.setdefault(sampling, Sampler(sampling, self._model.vocab_size))
        key = (sampling, len(text), tuple(text[-max(sampler.reach, 1) :]))
        if key not in self._known:
            if len(self._known) > _KEPT:
                self._known.clear()
            logits = self._model.model(mx.array([[text[-1]]]))[0]
            scores = sampler.scores(logits, [len(text)], [list(text)])
            self._known[key] = int(mx.argmax(scores[0]).item())  # type: ignore[arg-type]
        return self._known[key]
