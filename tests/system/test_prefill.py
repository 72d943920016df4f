"""Prompts read by a prefill worker: the text is the target's own, whatever fails, and timings count the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from outrider.engine.kv_cache import Feed, FlatKVCache, KVLayout
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.prefill_worker.worker import MlxReader, PrefillWorker
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Close, Fault, KvMemory, Message, Prefill, PromptKv
from outrider.protocol.sampling import SamplingParams
from tests.engine.test_ort_sessions import quantised
from tests.system.links import FakeLink, VirtualClock, run_worker
from tests.system.prefill_cluster import MessageFault, PrefillCluster
from tests.system.same_text import check_same
from tests.system.small_models import SMALL_CONFIG

PROMPT = tuple(random.Random(4).choices(range(2, 40), k=600))  # more than one forward
GREEDY, SAMPLED = SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temp=0.8, seed=5)
PIECE = 40  # tokens

Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]
Make = Callable[..., PrefillCluster]


def unchanged(message: Message, rng: random.Random) -> list[Message]:
    return [message]


@pytest.fixture
def model(loaded: Callable[..., LoadedModel], tiny_model: Callable[..., Any]) -> LoadedModel:
    return loaded(tiny_model("llama", **SMALL_CONFIG))


@pytest.fixture
def make(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    bytes_per_token = KVLayout.of(model.model).bytes_per_token
    monkeypatch.setattr("outrider.prefill_worker.worker.MAX_PIECE_BYTES", PIECE * bytes_per_token)
    return lambda fault=unchanged, **settings: PrefillCluster(model, None, clock, fault=fault, **settings)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("turns", [1, 100])
def test_prompt_read_by_a_prefill_worker_keeps_the_text(
    make: Make, model: LoadedModel, plain: Plain, sampling: SamplingParams, turns: int
) -> None:
    cluster = make(turns=turns)
    run = cluster.run(PROMPT, sampling)
    check_same(model, PROMPT, sampling, run.tokens, plain(model, PROMPT, sampling))
    assert run.timings.prefill_n == run.timings.prompt_n - 1 == len(PROMPT) - 1
    assert max(piece.count for piece in cluster.delivered) == PIECE


def test_next_turn_transfers_only_the_new_part_of_the_prompt(make: Make, model: LoadedModel, plain: Plain) -> None:
    cluster = make(kv_memory=1 << 24)
    first = cluster.run(PROMPT, GREEDY)
    longer = (*PROMPT, *first.tokens, *PROMPT[:80])
    cluster.delivered.clear()
    second = cluster.run(longer, GREEDY)
    check_same(model, longer, GREEDY, second.tokens, plain(model, longer, GREEDY))
    assert second.timings.cache_n >= len(PROMPT) and second.timings.prefill_n == second.timings.prompt_n - 1
    assert min(piece.start for piece in cluster.delivered) == second.timings.cache_n


def lose_or_repeat(message: Message, rng: random.Random) -> list[Message]:
    return [message] * rng.choice((0, 1, 1, 1, 2))


def truncate(message: Message, rng: random.Random) -> list[Message]:
    if isinstance(message, PromptKv) and rng.random() < 0.2:
        return [structs.replace(message, data=message.data[:-4])]
    return [message]


def drop_all(message: Message, rng: random.Random) -> list[Message]:
    return []


def change_epoch(message: Message, rng: random.Random) -> list[Message]:
    return [structs.replace(message, epoch=7)] if isinstance(message, PromptKv) else [message]


@pytest.mark.parametrize("fault", [lose_or_repeat, truncate, drop_all, change_epoch])
def test_lost_or_altered_prefill_messages_change_no_text(
    make: Make, model: LoadedModel, plain: Plain, fault: MessageFault
) -> None:
    cluster = make(fault)
    for sampling in (GREEDY, SAMPLED):
        run = cluster.run(PROMPT, sampling)
        check_same(model, PROMPT, sampling, run.tokens, plain(model, PROMPT, sampling))


def test_target_reads_the_rest_when_a_prefill_worker_dies(make: Make, model: LoadedModel, plain: Plain) -> None:
    def lose_worker(message: Message, rng: random.Random) -> list[Message]:
        if isinstance(message, PromptKv) and message.start >= 5 * PIECE:
            cluster.lose_prefill_worker()
            return []
        return [message]

    cluster = make(lose_worker)
    run = cluster.run(PROMPT, GREEDY)
    check_same(model, PROMPT, GREEDY, run.tokens, plain(model, PROMPT, GREEDY))
    assert 0 < run.timings.prefill_n < len(PROMPT) - 1


def test_replaced_target_receives_the_whole_prompt_again(make: Make, model: LoadedModel, plain: Plain) -> None:
    def replace_target(message: Message, rng: random.Random) -> list[Message]:
        if isinstance(message, PromptKv) and message.epoch == 0 and message.start == 5 * PIECE:
            cluster.replace_target()
            return []
        return [message]

    cluster = make(replace_target)
    run = cluster.run(PROMPT, GREEDY)
    check_same(model, PROMPT, GREEDY, run.tokens, plain(model, PROMPT, GREEDY))
    assert run.timings.resumed == 1
    assert next(piece.start for piece in cluster.delivered if piece.epoch) == 0


def test_prompt_that_can_not_be_copied_is_sent_all_the_same(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory is short: the prefill worker sends it, but does not cache it."""
    link, reader = FakeLink("prefill-0"), MlxReader(model)
    worker = PrefillWorker(link, reader, KVLayout.of(model.model, model.cpu))
    monkeypatch.setattr(FlatKVCache, "save", lambda *_: mx.zeros(-1))
    answers = run_worker(worker, link, [KvMemory(1 << 24), Prefill("r", 0, np.array(PROMPT[:100], np.int32), 0)])
    assert sum(answer.count for answer in answers if isinstance(answer, PromptKv)) == 99
    assert not any(isinstance(answer, Fault) for answer in answers) and reader.prompt_cache.use.entries == 0


def test_short_prompts_are_read_by_the_target(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make()
    monkeypatch.setattr(cluster.rounds._remote_prefills, "_min_tokens", len(PROMPT))
    cluster.run(PROMPT, GREEDY)
    assert not cluster.delivered


def test_concurrent_requests_finish_and_an_ended_one_closes_its_prefill(make: Make) -> None:
    """The prefill worker stops reading the prompt of a request that has ended."""
    cluster = make()
    texts = cluster.run_concurrently(PROMPT[:30], [SAMPLED, replace(SAMPLED, seed=6)], "ar")
    assert [len(text) for text in texts] == [12, 12]
    asked: list[Message] = []
    cluster._fault = lambda message, rng: asked.append(message) or [message]  # type: ignore[func-returns-value]
    cluster.run(PROMPT, replace(GREEDY, max_tokens=1))
    assert isinstance(asked[0], Prefill) and any(isinstance(message, Close) for message in asked)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kv_transfer_is_bit_exact(model: LoadedModel, dtype: mx.Dtype) -> None:
    kv_cache = open_kv_cache(model)
    assert isinstance(kv_cache, FlatKVCache)
    sequence, other = kv_cache.open(), kv_cache.open()
    kv_cache.forward([Feed(sequence, PROMPT[:9], 0, True)])
    layers = tuple((k.astype(dtype), v.astype(dtype)) for k, v in kv_cache.segment(sequence, 2, 9))
    layout = KVLayout.of(model.model)
    if dtype == mx.float32:
        kv_cache.extend(other, kv_cache.segment(sequence, 0, 9), 9)
        left, right = kv_cache.forward([Feed(sequence, [3], 1), Feed(other, [3], 1)])
        assert mx.array_equal(left, right)
    layout = KVLayout(tuple(tensor.astype(dtype) for tensor in layout.tensors))
    packed = layout.pack(layers)
    assert packed.dtype == np.uint8 and packed.size == 7 * layout.bytes_per_token
    again = layout.unpack(packed, 7)
    flat, back = ([array for pair in one for array in pair] for one in (layers, again))
    assert all(mx.array_equal(array, same) for array, same in zip(flat, back, strict=True))
    with pytest.raises(ProtocolError, match="run the same model on both sides"):
        layout.unpack(packed, 8)


def test_prompt_of_a_quantised_model_arrives_in_the_targets_number_format(
    tiny_model: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, plain: Plain
) -> None:
    """ONNX Runtime keeps keys and values in float16, unlike MLX's own forward of the module."""
    model = load(quantised(tiny_model("llama", **SMALL_CONFIG), tmp_path / "model"))
    monkeypatch.setattr("outrider.protocol.clock.now", clock := VirtualClock())
    assert model.cpu is not None and KVLayout.of(model.model, model.cpu).tensors[0].dtype == mx.float16
    run = PrefillCluster(model, None, clock, fault=unchanged).run(PROMPT, GREEDY)
    check_same(model, PROMPT, GREEDY, run.tokens, plain(model, PROMPT, GREEDY))
    assert run.timings.prefill_n == len(PROMPT) - 1
