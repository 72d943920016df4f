"""The certificate is an output of the model's own passes, and every change of it is detected."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict, replace

import mlx.core as mx
import msgspec
import pytest

from outrider.engine.kv_cache import CacheSlot, SeparateKVCache
from outrider.engine.load_checks import probe_abilities
from outrider.engine.loading import load
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import Grammar, SamplingParams
from outrider.protocol.stats import Claim
from outrider.target_worker.certificate import certify, main
from tests.harness.model_configs import WINDOW, config_of
from tests.harness.tiny_models import write_model
from tests.slots import open_slots, verify

PROMPT = (5, 9, 17, 4)
LENGTH = 24
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temp=0.9, top_p=0.9, min_p=0.02, top_k=40, repetition_penalty=1.2, seed=11)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model("llama"))


def true_claim(model, params, length=LENGTH):
    """A claim with the text of plain decoding."""
    slot = open_slots(model, [PROMPT], [params])[0]
    for _ in range(length):
        verify(slot)
    return Claim("", PROMPT, tuple(slot.tokens[len(PROMPT) :]), params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_output_of_the_model_itself_is_certified(model, params):
    reported = []
    report = certify(model, true_claim(model, params), lambda done, total: reported.append((done, total)))
    assert (report.positions, report.identical, report.ties, report.mismatches) == (LENGTH, LENGTH, (), ())
    assert report.context_length == model.context_length and reported == [(16, LENGTH)]


def test_output_of_a_model_that_only_decodes_is_certified(tmp_path):
    """A model with a window of its own, which the text exceeds."""
    model = load(write_model(tmp_path / "plamo3", config_of("plamo3")))
    assert not probe_abilities(model).chains
    claim = true_claim(model, SamplingParams(temp=1.0, seed=3), 3 * WINDOW)
    assert certify(model, claim).identical == len(claim.generated)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_changed_token_is_a_mismatch_at_its_position(model, params):
    claim = true_claim(model, params)
    wrong = (claim.generated[7] + 1) % model.vocab_size
    report = certify(model, replace(claim, generated=(*claim.generated[:7], wrong)))
    assert report.identical == 7 and report.ties == ()
    found = report.mismatches[0]
    assert (found.position, found.token, found.expected) == (len(PROMPT) + 7, wrong, claim.generated[7])
    assert found.margin is None or found.margin > found.tolerance


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_text_by_a_grammar_is_certified_only_with_that_grammar(model, params):
    params = replace(params, grammar=Grammar("regex", "[0-9]{30}"))
    slot = CacheSlot(
        model, SeparateKVCache(model.model), PROMPT, params,
        GrammarCompiler(model.folder).constraint(params.grammar, (0,), len(PROMPT)),
    )  # fmt: skip
    for _ in range(LENGTH):
        verify(slot)
    claim = Claim("", PROMPT, tuple(slot.tokens[len(PROMPT) :]), params, (0,))
    assert certify(model, claim).holds
    assert certify(model, replace(claim, sampling=replace(params, grammar=None))).mismatches
    letter = replace(claim, generated=(*claim.generated[:5], 80))
    assert [one.margin for one in certify(model, letter).mismatches] == [None], "no rounding explains a letter"


def test_claim_with_another_seed_has_mismatches(model):
    claim = true_claim(model, SAMPLED)
    assert certify(model, replace(claim, sampling=replace(SAMPLED, seed=12))).mismatches


@pytest.mark.parametrize(("gap", "tied"), [(5e-5, True), (5e-3, False)])
def test_a_token_below_the_best_by_less_than_rounding_is_a_tie(model, monkeypatch, gap, tied):
    claim = true_claim(model, GREEDY)
    best, second = claim.generated[0], (claim.generated[0] + 1) % model.vocab_size
    forward = CacheSlot.forward

    def near(slot, tokens):
        logits = forward(slot, tokens)
        logits[:, second] = logits[:, best] - gap
        return logits

    monkeypatch.setattr(CacheSlot, "forward", near)
    report = certify(model, replace(claim, generated=(second,)))
    assert (len(report.ties), len(report.mismatches)) == ((1, 0) if tied else (0, 1))
    assert (*report.ties, *report.mismatches)[0].margin == pytest.approx(gap, rel=0.5)


@pytest.mark.parametrize(("below", "tied"), [(1e-5, True), (1e-2, False)])
def test_token_at_the_border_of_top_p_is_a_tie_and_beyond_a_mismatch(model, below, tied):
    """top-p is chosen so that the sampled token lies just outside: rounding may have let it in."""
    plain = SamplingParams(temp=1.0, seed=0)
    slot = open_slots(model, [PROMPT], [plain])[0]
    probabilities = mx.softmax(slot.forward(mx.array(slot.unfed))[-1]).tolist()
    ordered = sorted(range(model.vocab_size), key=lambda token: -probabilities[token])
    for seed in range(50):
        claim = true_claim(model, replace(plain, seed=seed), 1)
        before = sum(probabilities[token] for token in ordered[: ordered.index(claim.generated[0])])
        if before > 0.2:
            break
    report = certify(model, replace(claim, sampling=replace(claim.sampling, top_p=before - below)))
    assert (len(report.ties), len(report.mismatches)) == ((1, 0) if tied else (0, 1))
    assert report.mismatches == () or report.mismatches[0].margin is None, "filtered out: it has no score"


@pytest.mark.parametrize(
    "claim",
    [
        Claim("", (), (1,), GREEDY),
        Claim("", (10**6,), (1,), GREEDY),
        Claim("", PROMPT, (10**6,), GREEDY),
    ],
)
def test_claim_with_unknown_or_missing_tokens_is_refused(model, claim):
    with pytest.raises(InvalidRequest):
        certify(model, claim)


# --- the process --------------------------------------------------------------------------------------------------


def run_process(text):
    done = subprocess.run(
        [sys.executable, "-m", "outrider.engine.models_only", "outrider.target_worker.certificate"],
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_process_reads_a_claim_and_ends_with_the_report(model, tiny_model):
    claim = true_claim(model, SAMPLED)
    fields = {"model": str(tiny_model("llama")), "tokens": PROMPT, "generated": claim.generated}
    done, lines = run_process(json.dumps({**fields, "sampling": asdict(SAMPLED)}))
    assert done.returncode == 0 and done.stderr == ""
    assert lines[-1]["positions"] == lines[-1]["identical"] + len(lines[-1]["ties"]) == LENGTH


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"sampling": replace(SAMPLED, rule="residual")}, InvalidRequest), ({"model": "/no/such"}, ModelError)],
)
def test_invalid_claim_is_reported_as_one_error(monkeypatch, capsys, tiny_model, changes, kind):
    claim = replace(Claim(str(tiny_model("llama")), PROMPT, (1,), SAMPLED), **changes)
    monkeypatch.setattr(sys, "stdin", io.StringIO(msgspec.json.encode(claim).decode()))
    assert main() == kind.exit_code
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reported["kind"] == kind.__name__ and reported["error"]
