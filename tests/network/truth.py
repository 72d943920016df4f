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
    """A request's tokens as the target says them by itself, one step a token, without an end."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._slot: CacheSlot = open_slots(model, [prompt], [sampling])[0]

    def first(self, count: int) -> list[int]:
        """So many, the prompt's among them."""
        while len(self._slot.tokens) < count:
            verify(self._slot)
        return self._slot.tokens[:count]


class FreshDrafter:
    """What a draft model says that remembers nothing: a forward over the last token, for tests.system.markov's."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._samplers: dict[SamplingParams, Sampler] = {}
        self._known: dict[tuple[SamplingParams, int, tuple[int, ...]], int] = {}

    def says(self, text: Sequence[int], count: int, sampling: SamplingParams) -> list[int]:
        """The `count` tokens after `text`."""
        said = list(text)
        for _ in range(count):
            said.append(self._next(said, sampling))
        return said[len(text) :]

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
