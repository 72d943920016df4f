"""Draft and target must have the same meaning for each token; padding makes no difference."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models

from outrider.orchestrator.pairing.tokenizer import require_same_vocabulary, vocabulary_digest
from outrider.protocol.errors import ModelError

WORDS = ["a", "b", "c", "<|end|>"]


@pytest.fixture
def with_words(codec):
    def make(words):
        vocabulary = {word: i for i, word in enumerate(words) if word is not None}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
        return replace(codec, tokenizer=tokenizer)

    return make


def test_vocabulary_is_the_same_as_itself(codec):
    require_same_vocabulary(codec, codec)


@pytest.mark.parametrize(
    "draft",
    [
        WORDS,
        [*WORDS, "<|reserved_special_token_7|>", "<unused3>", "[PAD]"],
        [*WORDS, "[PAD4]", "[PAD5]"],  # llama.cpp adds one for each embedding without a token
        [*WORDS[:3], "<|reserved_special_token_0|>"],
        [*WORDS[:3], "<SPECIAL_32>"],  # [ARGS] in later models of Mistral's
        [*WORDS[:3], "<\uff5cplace▁holder▁no▁798\uff5c>"],  # <think> in DeepSeek's R1
        [*WORDS[:3], "<|other|>"],
    ],
)
def test_names_in_brackets_are_ignored(with_words, draft):
    require_same_vocabulary(with_words(WORDS), with_words(draft))
    require_same_vocabulary(with_words(draft), with_words(WORDS))


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (["a", "c", "b", "<|end|>"], "2 tokens, such as 1 is 'b' and 'c'"),
        ([*WORDS, "d"], "1 tokens, such as 4 is '' and 'd'"),
        (["a", "b", None, "<|end|>"], "1 tokens, such as 2 is 'c' and ''"),
    ],
)
def test_different_vocabularies_are_refused_with_the_difference(with_words, draft, words):
    with pytest.raises(ModelError, match=words):
        require_same_vocabulary(with_words(WORDS), with_words(draft))


def test_fingerprint_depends_on_ordinary_tokens_only(with_words):
    """Models of one family, whose vocabularies differ only in names in brackets, have the same fingerprint."""
    ours = vocabulary_digest(with_words(WORDS))
    for family in ([*WORDS, "<|reserved_3|>", "[PAD]"], [*WORDS[:3], "<|eom|>"]):
        assert vocabulary_digest(with_words(family)) == ours
    for other in (["a", "c", "b", "<|end|>"], [*WORDS, "d"], ["a", "b", None, "<|end|>"]):
        assert vocabulary_digest(with_words(other)) != ours


def test_vocabulary_error_names_both_models(with_words):
    with pytest.raises(ModelError, match=r"vocabularies of .*target and .*target differ"):
        require_same_vocabulary(with_words(WORDS), with_words(["x"]))


def test_added_tokens_count_as_a_difference(codec):
    grown = Tokenizer.from_str(codec.tokenizer.to_str())
    grown.add_special_tokens(["think"])
    with pytest.raises(ModelError, match="'think'"):
        require_same_vocabulary(codec, replace(codec, tokenizer=grown))
    assert json.loads(codec.tokenizer.to_str())["added_tokens"], "the tiny tokenizer has added tokens of its own"
