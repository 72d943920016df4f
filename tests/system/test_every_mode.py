"""A cluster of real processes gives the target's own text in every mode, also to concurrent clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
import zmq
from mlx_lm.generate import generate_step

from outrider import Client, Grammar, LocalCluster, SamplingParams
from outrider.engine.loading import LoadedModel
from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.codec import decode, encode
from outrider.protocol.messages import Done, Generate
from outrider.protocol.ngrams import MAX_COPY_TOKENS
from outrider.protocol.stats import Claim
from outrider.target_worker.certificate import certify
from tests.harness.default_model import Prompt, mixed_prompts
from tests.suspend import pid_of, suspended
from tests.tiny import Pair

LIMIT_SECONDS = 200.0
LENGTH = 20
PROMPTS = mixed_prompts(4)
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temp=0.8, top_p=0.95, repetition_penalty=1.1, seed=5)
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["function", "class"]},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
# K and B by mode; None: the server's.
WAYS = {"sd": (3, None), "ssd": (6, 16), "auto": (None, None)}

CheckSame = Callable[[Prompt, SamplingParams, Sequence[int], Sequence[int]], None]
PlainResult = Callable[[Prompt, SamplingParams], GenerationResult]


@pytest.fixture(scope="module")
def cluster(served: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(model=served.target, draft_model=served.draft, max_active=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Client:
    return cluster.client()


@pytest.fixture(scope="module")
def check_same(served_target: LoadedModel, codec: TextCodec) -> CheckSame:
    """Checks for the same tokens, except for certified ties: the workers' BLAS rounds depending on shapes."""

    def check(prompt: Prompt, sampling: SamplingParams, got: Sequence[int], expected: Sequence[int]) -> None:
        if tuple(got) == tuple(expected):
            return
        report = certify(served_target, Claim("", codec.encode(prompt.text), tuple(got), sampling, tuple(codec.eos)))
        assert not report.mismatches and len(got) == len(expected)

    return check


@pytest.fixture(scope="module")
def plain_result(client: Client) -> PlainResult:
    """`plain_result(prompt, sampling)`: the result without drafts."""
    return cache(lambda prompt, sampling: client.generate(prompt.text, sampling, mode="ar"))


@pytest.mark.parametrize(
    ("prompt", "sampling", "mode"),
    [
        (PROMPTS[number % len(PROMPTS)], sampling, mode)
        for number, (sampling, mode) in enumerate(product((GREEDY, SAMPLED), WAYS))
    ],
)
def test_every_mode_gives_the_same_tokens(
    client: Client,
    plain_result: PlainResult,
    check_same: CheckSame,
    prompt: Prompt,
    sampling: SamplingParams,
    mode: str,
) -> None:
    expected, (depth, branches) = plain_result(prompt, sampling), WAYS[mode]
    assert len(expected.token_ids) == expected.timings.predicted_n == LENGTH
    result = client.generate(prompt.text, sampling, mode=mode, num_draft_tokens=depth, branches=branches)
    check_same(prompt, sampling, result.token_ids, expected.token_ids)
    assert result.timings.rounds > 0 and result.timings.peak_bytes > 0


@pytest.mark.parametrize(("depth", "branches"), [(1, 16), (6, 1)])
def test_every_depth_and_budget_gives_the_same_tokens(
    client: Client, plain_result: PlainResult, check_same: CheckSame, depth: int, branches: int
) -> None:
    prompt = PROMPTS[0]
    result = client.generate(prompt.text, SAMPLED, mode="ssd", num_draft_tokens=depth, branches=branches)
    check_same(prompt, SAMPLED, result.token_ids, plain_result(prompt, SAMPLED).token_ids)
    assert len(result.timings.drafted_by_position) <= max(depth, MAX_COPY_TOKENS)


def test_concurrent_schema_requests_equal_a_single_request(client: Client, check_same: CheckSame) -> None:
    """With a request in every mode at once. The text is JSON by the schema, and each token has its log-probability."""
    sampling = SamplingParams(max_tokens=90, temp=0.8, seed=8, grammar=Grammar.json_schema(SCHEMA), logprobs=1)
    plain = client.generate(PROMPTS[3].text, sampling, mode="ar")
    assert plain.finish_reason == "eos"
    jsonschema.validate(json.loads(plain.text), SCHEMA)
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(client.generate, PROMPTS[3].text, sampling, mode=m) for m in ("ar", "sd", "ssd", "auto")]
    for result in (future.result(LIMIT_SECONDS) for future in pending):
        check_same(PROMPTS[3], sampling, result.token_ids, plain.token_ids)
        logprobs = result.logprobs or ()
        assert tuple(one.token for one in logprobs) == result.token_ids
        assert all(one.logprob <= one.top[0][1] <= 0 for one in logprobs)
        if result.token_ids == plain.token_ids:
            assert np.allclose(
                [one.logprob for one in logprobs], [one.logprob for one in plain.logprobs or ()], atol=1e-3
            )


def test_server_is_usable_after_a_grammar_stream_is_left(client: Client) -> None:
    sampling = SamplingParams(max_tokens=200, temp=0.8, seed=8, grammar=Grammar("regex", "[a-z ]{300,}"))
    for chunk in client.stream(PROMPTS[0].text, sampling, mode="ssd"):
        assert set(chunk.text) <= set("abcdefghijklmnopqrstuvwxyz ")
        break
    assert client.generate(PROMPTS[0].text, SamplingParams(max_tokens=4)).token_ids


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=lambda prompt: prompt.name)
def test_greedy_tokens_equal_those_of_mlx_lm(
    client: Client, served_target: LoadedModel, codec: TextCodec, check_same: CheckSame, prompt: Prompt
) -> None:
    tokens = mx.array(codec.encode(prompt.text))
    theirs = [token for token, _ in generate_step(tokens, served_target.model, max_tokens=LENGTH)]
    check_same(prompt, GREEDY, client.generate(prompt.text, GREEDY, mode="ssd").token_ids, theirs)


def test_stream_chunks_add_up_to_the_result(client: Client) -> None:
    stream = client.stream(PROMPTS[0].text, SAMPLED, mode="ssd")
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == stream.result.token_ids
    assert len(chunks) > 5


def test_async_client_returns_the_same_text(cluster: LocalCluster, client: Client) -> None:
    async def ask() -> tuple[tuple[int, ...], str]:
        async_client = cluster.async_client()
        result = await async_client.generate(PROMPTS[0].text, SAMPLED, mode="ssd")
        stream = async_client.stream(PROMPTS[0].text, SAMPLED, mode="ssd")
        return result.token_ids, "".join([chunk.text async for chunk in stream])

    token_ids, text = asyncio.run(ask())
    again = client.generate(PROMPTS[0].text, SAMPLED, mode="ssd")
    assert (token_ids, text) == (again.token_ids, again.text)


def test_single_request_is_not_queued_behind_all_of_a_busy_client(cluster: LocalCluster, client: Client) -> None:
    """The target is suspended until the server has received all requests. The ends arrive in their order."""
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(cluster.endpoint)
        with suspended(pid_of(client, "target")):
            for number, client_name in enumerate(["busy"] * 16 + ["single"]):
                socket.send_multipart(
                    encode(Generate(f"{client_name} {number}", PROMPTS[0].text, None, sampling, client=client_name))
                )
            while (stats := client.stats()).active + stats.queued < 17:
                time.sleep(0.01)
        finished = list[str]()
        while len(finished) < 17:
            assert socket.poll(1000 * LIMIT_SECONDS)
            received = decode(socket.recv_multipart())
            finished += [received.request] if isinstance(received, Done) else []
    assert finished.index("single 16") < 14
