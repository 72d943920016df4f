"""A text constrained by a grammar is the same with any drafter, and drafts follow the grammar, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.grammar import compiler
from outrider.protocol.messages import Autonomous, Open, Verify
from outrider.protocol.sampling import Grammar, SamplingParams
from outrider.target_worker.worker import TargetWorker
from tests.system.cluster import AMPLE, MIXED, Cluster, Run
from tests.system.links import FakeLink, run_worker

Make = Callable[..., Cluster]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]
BYTES = {"vocab_size": 258}
"""The tokenizer's vocabulary: 0 ends the text, 1 is padding, then come the bytes in the order of ALPHABET."""
END = frozenset({0})
ALPHABET = bytes([*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173])
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PAD = 1
"""A special token, which has no text."""
PATTERN = r"(f\([a-z]{1,4}\);){2,4}( go| gone)?"
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar("regex", PATTERN),
    "lark": Grammar(
        "grammar", 'start: "[" pair ("," pair)* "]"\npair: "(" NUM ("" | "+" NUM) ")"\nNUM: /[0-9]{1,2}/\n'
    ),
    "marked": Grammar(
        "llguidance",
        json.dumps(
            {
                "grammars": [
                    {"lark_grammar": f"start: THOUGHT <[{PAD}]> @form\nTHOUGHT: /[a-z ]{{3,12}}/"},
                    {"name": "form", "json_schema": SCHEMA},
                ]
            }
        ),
    ),
}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=120),
    "0.8": SamplingParams(max_tokens=120, temp=0.8, seed=11),
    "penalised": SamplingParams(
        max_tokens=120, temp=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2, seed=4
    ),
}
EACH = [*zip(GRAMMARS, ("greedy", "0.8", "greedy", "0.8"), strict=True), ("schema", "penalised")]
every_grammar = pytest.mark.parametrize("grammar", GRAMMARS)
every_text = pytest.mark.parametrize(("grammar", "sampling"), EACH)


def tokens_of(text: str) -> list[int]:
    return [ALPHABET.index(byte) + 2 for byte in text.encode()]


def text_of(tokens: list[int]) -> str:
    return bytes(ALPHABET[token - 2] for token in tokens if token > 1).decode()


PROMPT = tokens_of('{"name": "x", f(')  # not a prefix of a text that any of the grammars allows


def sampling_with_grammar(grammar: str, sampling: str) -> SamplingParams:
    return replace(SAMPLINGS[sampling], grammar=GRAMMARS[grammar])


def check_text(grammar: str, run: Run) -> None:
    assert run.reason == "eos" and run.tokens[-1] == 0
    text = text_of(run.tokens)
    match grammar:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(PATTERN, text)
        case "marked":
            thought, form = (text_of(list(part)) for mark, part in groupby(run.tokens, PAD.__eq__) if not mark)
            assert re.fullmatch("[a-z ]{3,12}", thought) and run.tokens.count(PAD) == 1
            jsonschema.validate(json.loads(form), SCHEMA)
        case "lark":
            assert re.fullmatch(r"\[\(\d{1,2}(\+\d{1,2})?\)(,\(\d{1,2}(\+\d{1,2})?\))*\]", text)


KNOWN: dict[tuple[str, str], Run] = {}


@pytest.fixture
def alone(make_cluster: Make) -> Callable[[str, str], Run]:
    """`alone(grammar, sampling)`: the run of this request without drafts."""

    def run(grammar: str, sampling: str) -> Run:
        if (grammar, sampling) not in KNOWN:
            cluster = make_cluster(None, config=BYTES)
            KNOWN[grammar, sampling] = cluster.run(PROMPT, sampling_with_grammar(grammar, sampling), "ar", END)
        return KNOWN[grammar, sampling]

    return run


OTHERS = [("schema", "0.8", "random"), ("lark", "0.8", None)]


@pytest.mark.parametrize(("grammar", "sampling", "draft"), [(*each, "model") for each in EACH] + OTHERS)
def test_every_mode_gives_the_constrained_text(
    make_cluster: Make, alone: Callable[[str, str], Run], grammar: str, sampling: str, draft: str | None
) -> None:
    expected = alone(grammar, sampling)
    check_text(grammar, expected)
    cluster = make_cluster(draft, config=BYTES, schedule=MIXED, seed=3)
    for mode in ("ssd", "sd", "auto"):
        run = cluster.run(PROMPT, sampling_with_grammar(grammar, sampling), mode, END)
        assert (run.tokens, run.reason) == (expected.tokens, expected.reason), mode


@every_text
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_draft_equal_to_the_target_is_always_accepted(
    make_cluster: Make, grammar: str, sampling: str, mode: str
) -> None:
    """Drafter and target exclude the same tokens; otherwise a drafted token would be rejected somewhere."""
    cluster = make_cluster("self", config=BYTES, schedule=AMPLE, ngrams=False, full_depth=True)
    run = cluster.run(PROMPT, sampling_with_grammar(grammar, sampling), mode, END)
    chains = [round_ for round_ in run.rounds if round_.chain]
    assert len(chains) > 1
    text_tokens = [*PROMPT, *run.tokens]
    for round_ in chains:
        following = text_tokens[round_.base_len : round_.base_len + len(round_.chain)]
        assert list(round_.chain[: len(following)]) == following
    check_text(grammar, run)


@every_grammar
def test_residual_texts_follow_the_grammar(make_cluster: Make, grammar: str) -> None:
    for seed, mode in enumerate(("ssd", "sd", "ar")):
        sampling = replace(sampling_with_grammar(grammar, "0.8"), rule="residual", seed=seed, q_width=3)
        run = make_cluster("model", config=BYTES, schedule=MIXED).run(PROMPT, sampling, mode, END)
        check_text(grammar, run)


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
def test_in_process_drafter_follows_the_grammar(
    make_cluster: Make, alone: Callable[[str, str], Run], sampling: str
) -> None:
    cluster = make_cluster(None, config=BYTES, colocated="self", ngrams=False)
    run = cluster.run(PROMPT, sampling_with_grammar("schema", sampling), "sd", END)
    assert run.tokens == alone("schema", sampling).tokens
    assert run.timings.draft_n == run.timings.draft_n_accepted > 10


@pytest.mark.parametrize("taken", [0, 1, 7, 20])
def test_resumed_text_continues_by_the_grammar(small_pair: Small, alone: Callable[[str, str], Run], taken: int) -> None:
    """An OPEN whose tokens contain generated ones after the prompt, as after a RESYNC."""
    expected, sampling = alone("schema", "0.8").tokens, sampling_with_grammar("schema", "0.8")
    tokens = np.array([*PROMPT, *expected[:taken]], np.int32)
    link = FakeLink("target-0")
    worker = TargetWorker(link, small_pair("self", **BYTES)[0])  # type: ignore[arg-type]
    (first,) = run_worker(worker, link, [Open("r", 1, 5, tokens, sampling, (0,), generated=taken)])
    room = len(expected) - taken - 1
    autonomous = Verify("r", 1, 6, len(tokens) + 1, Autonomous(room))
    found = [answer.bonus for answer in (first, *run_worker(worker, link, [autonomous]))]
    assert found == expected[taken:]


def test_requests_sharing_forwards_keep_their_own_grammars(small_pair: Small, alone: Callable[[str, str], Run]) -> None:
    """Constrained requests and a free one, which all decode plainly in the same forwards."""
    link = FakeLink("target-0")
    worker = TargetWorker(link, small_pair("self", **BYTES)[0])  # type: ignore[arg-type]
    samplings = {**{name: sampling_with_grammar(name, "0.8") for name in GRAMMARS}, "free": SAMPLINGS["0.8"]}
    opens = [Open(name, 0, 0, np.array(PROMPT, np.int32), sampling, (0,)) for name, sampling in samplings.items()]
    answers = run_worker(worker, link, opens)
    answers += run_worker(worker, link, [Verify(name, 0, 1, len(PROMPT) + 1, Autonomous(60)) for name in samplings])
    found = {name: [answer.bonus for answer in answers if answer.request == name] for name in samplings}
    assert max(answer.rows for answer in answers[len(opens) :]) == len(samplings)
    for name in GRAMMARS:
        expected = alone(name, "0.8").tokens
        assert found[name] == expected


def test_request_fails_when_its_grammar_exceeds_the_limits(make_cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PARSER_LIMITS", LLParserLimits(step_lexer_fuel=300, verbose_errors=False))
    hard = SamplingParams(grammar=Grammar("regex", "go ((a|b)*a(a|b){12}|c{3,900}d)+"))
    with pytest.raises(RuntimeError, match="can't be followed after"):
        make_cluster("self", config=BYTES).run(PROMPT, hard, "ssd", END)
    free = make_cluster("self", config=BYTES).run(PROMPT, SamplingParams(max_tokens=5), "ssd", END)
    assert free.tokens


def test_drafter_without_a_grammar_compiler_changes_no_text(
    make_cluster: Make, small_pair: Small, alone: Callable[[str, str], Run]
) -> None:
    """Its drafts are not constrained, so more of them are rejected."""
    cluster = make_cluster(MlxDrafter(small_pair("self", **BYTES)[1]), config=BYTES)
    assert cluster._draft_worker is not None
    cluster._draft_worker._compiler = None
    assert (
        cluster.run(PROMPT, sampling_with_grammar("schema", "greedy"), "ssd", END).tokens
        == alone("schema", "greedy").tokens
    )
