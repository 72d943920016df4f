"""The prompts: enough of each class, short, and none twice."""

from __future__ import annotations

import pytest

from outrider.bench.prompts import CLASSES, load, mixed
from outrider.orchestrator.pair.model_files import EMBEDDED_TARGET, find_model
from outrider.orchestrator.pair.tokenizer import load_codec
from outrider.protocol.errors import InvalidRequest


@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_has_enough_short_prompts(kind: str) -> None:
    codec = load_codec(find_model(str(EMBEDDED_TARGET)))
    prompts = load(kind)
    assert len(prompts) >= (24 if kind == "code" else 12)
    assert all(30 <= len(codec.encode(prompt.text)) <= 200 for prompt in prompts)
    assert all(prompt.text == prompt.text.rstrip() and "%\n" not in prompt.text for prompt in prompts)


def test_no_prompt_occurs_twice() -> None:
    texts = [prompt.text for kind in CLASSES for prompt in load(kind)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("count", [4, 8, 50])
def test_any_number_is_a_fair_mixture(count: int) -> None:
    kinds = [prompt.kind for prompt in mixed(count)]
    assert len(kinds) == count
    assert min(kinds.count(kind) for kind in CLASSES) >= count // 5


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_a_number_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match="expected 1 to"):
        mixed(count)


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected one of code"):
        load("poems")
