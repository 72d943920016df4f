"""Reported log-probabilities equal those of single forwards, however tokens were generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from outrider.engine.kv_cache import CacheSlot, FlatKVCache, SeparateKVCache
from outrider.engine.loading import LoadedModel
from outrider.engine.verify import VerifyInput, VerifyOutput, begin_forward
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol.sampling import Grammar, SamplingParams
from outrider.protocol.schema import IMPOSSIBLE_LOGPROB, Logprobs, concat_logprobs
from tests.slots import verify

Loaded = Callable[..., LoadedModel]
PROMPT = [40, 41, 42, 43, 44, 60, 61, 40, 41]
COUNT = 12
DIGITS = Grammar("regex", "[0-9]{1,40}")
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SETTINGS = {
    "greedy": SamplingParams(logprobs=3),
    "sampled": SamplingParams(temp=0.8, top_p=0.9, seed=5, logprobs=5, logit_bias=((50, 1.5),), **PENALTIES),  # type: ignore[arg-type]
    "by a grammar": SamplingParams(temp=0.8, seed=6, logprobs=20, grammar=DIGITS, repetition_penalty=1.1),
    "residual": SamplingParams(temp=0.9, seed=7, logprobs=2, rule="residual"),
    "its own alone": SamplingParams(logprobs=0),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def slot_of(
    model: LoadedModel, params: SamplingParams, kv_cache: FlatKVCache | SeparateKVCache | None = None
) -> CacheSlot:
    constraint = GrammarCompiler(model.folder).constraint(params.grammar, (0,), len(PROMPT))
    slot = CacheSlot(model, kv_cache or SeparateKVCache(model.model), PROMPT, params, constraint)
    slot.feed_all_but_last()
    return slot


def expected_logprobs(model: LoadedModel, params: SamplingParams, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities [V] of the token after `tokens`, by a single forward."""
    logits = model.model(mx.array([tokens]))[0, -1:].astype(mx.float32)
    processors = make_logits_processors(
        dict(params.logit_bias) or None, params.repetition_penalty if params.repetition_penalty != 1 else None, 20,
        params.presence_penalty, 20, params.frequency_penalty, 20,
    )  # fmt: skip
    for processor in processors:
        logits = processor(mx.array(tokens), logits)
    wide = np.array(logits, np.float64)[0]
    if params.grammar is not None:
        digits = [ord(letter) - 33 + 2 for letter in "0123456789"]  # with tests.tiny's tokenizer; 0 ends the text
        wide[[i for i in range(len(wide)) if i not in [*digits, *([0] if len(tokens) > len(PROMPT) else [])]]] = -np.inf
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def check(model: LoadedModel, params: SamplingParams, tokens: Sequence[int], reported: Logprobs) -> None:
    """Checks the log-probabilities reported for `tokens`, which were generated after PROMPT."""
    width = 1 + (params.logprobs or 0)
    assert reported.ids.shape == reported.values.shape == (len(tokens), width)
    for i, token in enumerate(tokens):
        own = expected_logprobs(model, params, [*PROMPT, *tokens[:i]])
        known = reported.values[i] > IMPOSSIBLE_LOGPROB
        assert reported.ids[i, 0] == token
        assert np.abs(reported.values[i][known] - own[reported.ids[i][known]]).max() < 1e-4
        assert (own[reported.ids[i][~known]] == -np.inf).all()
        best = np.sort(own)[::-1][: width - 1]
        assert np.abs(np.exp(reported.values[i, 1:]) - np.exp(best)).max(initial=0) < 1e-4
        assert len(set(reported.ids[i, 1:].tolist())) == width - 1


def tokens_and_logprobs(slot: CacheSlot, outputs: Sequence[VerifyOutput]) -> tuple[list[int], Logprobs]:
    return slot.tokens[len(PROMPT) :], concat_logprobs([v.logprobs for v in outputs if v.logprobs is not None])


@every_setting
def test_logprobs_of_plain_steps_equal_single_forwards(loaded: Loaded, setting: str) -> None:
    model, params = loaded(), SETTINGS[setting]
    slot = slot_of(model, params)
    check(model, params, *tokens_and_logprobs(slot, [verify(slot) for _ in range(COUNT)]))


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "residual"])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_logprobs_of_right_and_wrong_chains_equal_single_forwards(loaded: Loaded, setting: str, right: int) -> None:
    model, params = loaded(), SETTINGS[setting]
    plain = slot_of(model, params)
    truth = [verify(plain).bonus for _ in range(COUNT)]
    slot, outputs, done = slot_of(model, params), [], 0
    while done + 5 <= COUNT:
        chain = [t if i < right else (t + 1) % 258 for i, t in enumerate(truth[done : done + 4])]
        outputs.append(verify(slot, chain))
        done = len(slot.tokens) - len(PROMPT)
    assert slot.tokens[len(PROMPT) :] == truth[:done]
    check(model, params, *tokens_and_logprobs(slot, outputs))


def test_logprobs_of_overlapping_batches_equal_single_forwards(loaded: Loaded) -> None:
    model = loaded()
    kv_cache = FlatKVCache(model.model)
    slots = {name: slot_of(model, params, kv_cache) for name, params in SETTINGS.items()}
    found: dict[str, list[VerifyOutput]] = {name: [] for name in slots}
    for _ in range(COUNT // 2):
        first = begin_forward([VerifyInput(slot) for slot in slots.values()])
        second = begin_forward([VerifyInput(slot) for slot in slots.values()], (), first)
        for forward in (first, second):
            for name, output in zip(slots, forward.commit(), strict=True):
                assert isinstance(output, VerifyOutput)
                found[name].append(output)
    for name, slot in slots.items():
        check(model, SETTINGS[name], *tokens_and_logprobs(slot, found[name]))


def test_logprobs_are_absent_unless_requested(loaded: Loaded) -> None:
    assert verify(slot_of(loaded(), SamplingParams())).logprobs is None
