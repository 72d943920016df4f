"""Random concurrent requests have the same texts as alone: a short run of `tests.harness.random_identity`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import LocalCluster
from outrider.bench.comparison.runs import Arrival
from outrider.orchestrator.pairing.model_files import MODEL_VARIABLE as MODEL
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Difference, Report
from tests.harness import random_identity
from tests.harness.random_identity import IdentityRun, compare_reply, describe_difference
from tests.harness.random_requests import MODES, Sizes, draw_prompt, draw_request
from tests.harness.requests import FullReply, TimedRequest
from tests.tiny import Pair

SOURCE = range(2, 2000)
ASKED = TimedRequest((1, 2), SamplingParams(max_tokens=3), "ssd")
ALONE = FullReply(0.0, (Arrival(1.0, 3),), (4, 5, 6), "abc", "length")


def test_random_concurrent_requests_equal_single_ones(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, str(served.target))
    with LocalCluster(model=served.target, draft_model=served.draft, max_active=16) as cluster:
        codec = load_codec(find_model(str(served.target)))
        client = cluster.client()
        identity_run = IdentityRun(client, client, codec, 1, Sizes(prompt=300, text=16), lambda _: None)
        found = identity_run.run_block(0, 20, (1, 4, 16))
    assert len(found) == 20 and not [str(one) for one in found if one.verdict == random_identity.DIFFERENT]
    asked = [one.request for one in found]
    assert {one.mode for one in asked} == set(MODES)
    assert any(one.until for one in asked) and any(one.sampling.stop for one in asked)
    assert {one.sampling.temp for one in asked} == {0.0, 0.8}


def test_drawn_request_depends_only_on_its_number_and_seed() -> None:
    drawn = [draw_prompt(number, 3, SOURCE, Sizes()) for number in range(200)]
    assert drawn[7] == draw_prompt(7, 3, SOURCE, Sizes()) != draw_prompt(7, 4, SOURCE, Sizes())
    assert draw_request(29, 3, drawn[7]) == draw_request(29, 3, draw_prompt(7, 3, SOURCE, Sizes()))
    lengths = [len(tokens) for tokens, _ in drawn]
    assert min(lengths) < 3 and 700 < max(lengths) <= 900
    assert max(sampling.max_tokens for _, sampling in drawn) <= 80


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (ALONE, ""),
        (replace(ALONE, token_ids=(4, 7, 6)), "another token at 1 of 3"),
        (replace(ALONE, token_ids=(4, 5)), "another token at 2 of 3"),
        (replace(ALONE, text="abd"), "the text 'abd', not 'abc'"),
        (replace(ALONE, reason="eos"), "ended by eos, not length"),
        (replace(ALONE, token_ids=(4, 5), text="ab", reason="cancelled", cancelled=True), ""),
        (replace(ALONE, token_ids=(5,), text="b", reason="cancelled", cancelled=True), "another token at 0 of 3"),
        (replace(ALONE, token_ids=(4, 5, 6, 7), text="abc", cancelled=True), "another token at 3 of 3"),
    ],
)
def test_reply_is_compared_by_tokens_text_and_finish_reason(reply: FullReply, why: str) -> None:
    assert describe_difference(ASKED, reply, ALONE) == why


@pytest.mark.parametrize(
    ("ties", "mismatches", "verdict"), [(1, 0, random_identity.TIE), (0, 0, "DIFFERENT"), (1, 1, "DIFFERENT")]
)
def test_difference_is_a_tie_only_with_a_certificate(
    monkeypatch: pytest.MonkeyPatch, ties: int, mismatches: int, verdict: str
) -> None:
    difference = Difference(3, 7, 5, 1e-5, 1e-4)
    report = Report(3, 2, (difference,) * ties, (difference,) * mismatches, 1024)
    monkeypatch.setattr(random_identity, "certify", lambda *_: report)
    codec = load_codec(find_model(str(TINY_TARGET)))
    other = (40, 70, 60)
    reply = replace(ALONE, token_ids=other, text=codec.decode(other))
    assert compare_reply(9, 4, ASKED, reply, ALONE, codec).verdict == verdict
