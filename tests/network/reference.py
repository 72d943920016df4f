"""The expected results, whatever the network does: the text of the target alone, and the drafts of a fresh drafter."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.engine.kv_cache import CacheSlot
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.protocol.sampling import SamplingParams
from tests.slots import open_slots, verify

MAX_CACHED = 20_000


class ReferenceText:
    """The text that the target alone generates after a prompt, without an end; computed as far as it is needed."""

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
            if len(self._known) > MAX_CACHED:
                self._known.clear()
            logits = self._model.model(mx.array([[text[-1]]]))[0]
            scores = sampler.scores(logits, [len(text)], [list(text)])
            self._known[key] = int(mx.argmax(scores[0]).item())  # type: ignore[arg-type]
        return self._known[key]
