"""The tokenizer: any text round-trips, it has the requested size, and training is deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.training import tokenizer
from models.training.corpus import Source, gather, standard_library

MODELS = Path(__file__).resolve().parents[2] / "models"
HARD = 'def f(x):\n\n        """naïve 東京 \U0001f600"""\n\treturn x  \r\n  1234 !=  \x00'


@pytest.fixture(scope="module")
def texts() -> list[str]:
    corpus = gather(standard_library(), seed=0, held_out=4, max_characters=200_000)
    return [source.text for source in corpus.train]


@pytest.fixture(scope="module")
def learned(texts: list[str]) -> Tokenizer:
    return tokenizer.train(texts, 512)


def test_vocabulary_has_the_requested_size_and_id_0_opens_a_text(learned: Tokenizer) -> None:
    assert learned.get_vocab_size() == 512
    assert learned.token_to_id(tokenizer.END_OF_TEXT) == 0
    assert learned.encode("x").ids[0] == 0


def test_any_text_round_trips(learned: Tokenizer) -> None:
    assert learned.decode(learned.encode(HARD).ids) == HARD


def test_training_is_deterministic(texts: list[str], learned: Tokenizer) -> None:
    assert tokenizer.train(texts, 512).to_str() == learned.to_str()


def test_stream_is_the_sources_in_order_each_opened_by_id_0(learned: Tokenizer) -> None:
    sources = [Source("a", "import os\n"), Source("b", "x = 1\n")]
    stream = tokenizer.encode(learned, sources).tolist()
    assert stream == [token for source in sources for token in learned.encode(source.text).ids]
    assert stream.count(0) == 2


def test_text_is_split_as_by_the_tiny_tokenizer(learned: Tokenizer) -> None:
    embedded = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    ours, theirs = (t.pre_tokenizer.pre_tokenize_str(HARD) for t in (learned, embedded))
    assert ours == theirs
