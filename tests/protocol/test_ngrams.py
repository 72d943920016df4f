"""N-grams: copies of the longest match, tables of a model's texts, and how many tokens of a copy to verify."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.training.draft.ngrams import save_table
from outrider.protocol import ngrams
from outrider.protocol.errors import ModelError
from outrider.protocol.ngrams import (
    INDEX_PIECE_TOKENS,
    MAX_NGRAM_SIZE,
    MIN_NGRAM_SIZE,
    TABLE_PROBABILITIES,
    Copy,
    CopyAcceptance,
    NgramIndex,
    NgramTable,
)

texts = st.lists(st.integers(0, 3), max_size=40)


@given(texts, texts, st.integers(0, 12))
def test_copy_continues_the_latest_match_of_the_longest_suffix(text: list[int], then: list[int], length: int) -> None:
    found = NgramIndex(text).lookup(length, then)
    whole = text + then
    for n in range(min(MAX_NGRAM_SIZE, len(whole)), MIN_NGRAM_SIZE - 1, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == whole[-n:]]
        if places:
            expected = list(whole)
            for _ in range(length):
                expected.append(expected[places[-1] + len(expected) - len(whole)])
            assert found == Copy(tuple(expected[len(whole) :]), n)
            return
    assert found == Copy()


@given(texts, st.integers(0, 40))
def test_extending_in_steps_equals_indexing_at_once(text: list[int], cut: int) -> None:
    index = NgramIndex(text[:cut])
    index.extend(text[cut:])
    assert index.lookup(8) == NgramIndex(text).lookup(8)


def test_copy_of_a_loop_continues_past_the_end_of_the_text() -> None:
    assert NgramIndex([1, 2, 3, 1, 2, 3, 1, 2]).lookup(7) == Copy((3, 1, 2, 3, 1, 2, 3), 5)
    assert NgramIndex([1, 2, 3, 1, 2, 3]).lookup(4, then=[1, 2]) == Copy((3, 1, 2, 3), 5)


@given(texts, texts, st.integers(0, 12), st.sets(st.integers(0, 3)))
def test_copy_ends_before_an_end_token(text: list[int], then: list[int], length: int, ends: set[int]) -> None:
    """Such as that of an earlier message of a conversation: nothing after it is ever verified."""
    index, whole = NgramIndex(text), NgramIndex(text).lookup(length, then)
    index.ends = frozenset(ends)
    count = next((place for place, token in enumerate(whole.chain) if token in ends), length)
    assert index.lookup(length, then) == Copy(whole.chain[:count], whole.evidence)


@given(texts, texts, st.integers(1, 9))
def test_reading_in_pieces_equals_indexing_at_once(text: list[int], then: list[int], piece: int) -> None:
    long = [9] * INDEX_PIECE_TOKENS + text
    index = NgramIndex()
    index.extend(long)
    assert index.is_behind == bool(text)
    index.extend(then)
    while index.is_behind:
        index.index_more(piece)
    assert index.lookup(8) == NgramIndex(long + then).lookup(8)


def test_lookup_finds_only_indexed_text() -> None:
    index = NgramIndex()
    index.extend([*range(INDEX_PIECE_TOKENS), 1, 2])
    assert index.lookup(3) == Copy((3, 4, 5), 2)
    index.extend([INDEX_PIECE_TOKENS + 1, INDEX_PIECE_TOKENS + 2])
    assert index.lookup(3) == Copy()


def test_index_of_a_long_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "INDEX_WINDOW_TOKENS", 50)
    index = NgramIndex(range(1000))
    assert index.lookup(2, then=[960, 961]) == Copy((962, 963), 2)
    assert index.lookup(2, then=[900, 901]) == Copy()
    index.extend(range(2000, 2200))
    assert len(index._followed_at) <= 4 * 50


def table(entries: dict[tuple[int, ...], tuple[int, float]], folder: Path) -> NgramTable:
    save_table(folder / "table", entries, {})
    return NgramTable.load(folder / "table")


@given(st.dictionaries(st.lists(st.integers(0, 60_000), min_size=1, max_size=3).map(tuple), st.integers(0, 60_000)))
def test_a_table_knows_its_ngrams_and_no_others(entries: dict[tuple[int, ...], int]) -> None:
    with TemporaryDirectory() as folder:
        found = table({ngram: (token, 0.5) for ngram, token in entries.items()}, Path(folder))
    for ngram in [*entries, (60_001,), (1, 2, 60_001)]:
        longest = next((entries[ngram[at:]] for at in range(len(ngram)) if ngram[at:] in entries), -1)
        assert found.lookup(ngram)[0] == longest
        assert found.lookup((60_001, *ngram))[0] == longest


def test_table_is_used_where_the_text_has_no_copy(tmp_path: Path) -> None:
    found = table({(7,): (8, 0.6), (7, 8): (9, 0.9), (9,): (7, 0.1)}, tmp_path)
    evidence = MAX_NGRAM_SIZE + 3  # from 0.5 to 0.7
    assert NgramIndex([1, 7], found).lookup(5) == Copy((8, 9), evidence)
    assert NgramIndex([1, 7], found).lookup(1) == Copy((8,), evidence)
    (index := NgramIndex([1, 7], found)).ends = frozenset({9})
    assert index.lookup(5) == Copy((8,), evidence)
    assert NgramIndex([1, 7, 5, 1, 7], found).lookup(2) == Copy((5, 1), 2)
    assert NgramIndex([1, 2], found).lookup(5, then=[7, 8]) == Copy((9,), MAX_NGRAM_SIZE + 4)
    assert NgramIndex([9], found).lookup(5) == NgramIndex([], found).lookup(5) == NgramIndex([7]).lookup(5) == Copy()


def test_chain_from_a_table_ends_where_it_becomes_unlikely(tmp_path: Path) -> None:
    found = table({(1,): (1, 0.6)}, tmp_path)
    assert found.copy([1], 12).chain == (1,) * 3  # 0.6 ** 3 is above the limit of 0.2, 0.6 ** 4 is not


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "unsorted"])
def test_damaged_table_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "table"
    if damage != "missing":
        save_table(path, {(1,): (2, 0.5), (3,): (4, 0.5)}, {})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    if damage == "other":
        save_file({"gaps": np.zeros(2, np.float32)}, path)
    if damage == "unsorted":
        arrays = load_file(path)
        save_file(arrays | {"gaps": arrays["gaps"] * 0}, path)
    with pytest.raises(ModelError, match=f"{path} is not a table of n-grams"):
        NgramTable.load(path)


def test_acceptance_rates_are_kept_by_evidence() -> None:
    rates = CopyAcceptance()
    for _ in range(40):
        rates.add(Copy((1, 2, 3), 5), (1, 2, 9))
        rates.add(Copy((1, 2, 3), MAX_NGRAM_SIZE + 1), (4,))
    assert rates.rate(5, 0) > 0.9 and 0.4 < rates.rate(5, 1) < 0.6
    assert rates.rate(MAX_NGRAM_SIZE + 1, 0) < 0.05 and rates.rate(MAX_NGRAM_SIZE + 2, 0) == TABLE_PROBABILITIES[1]


def test_a_copy_is_verified_as_far_as_it_is_worth_its_rows() -> None:
    rates, copy = CopyAcceptance(prior=0.6), Copy((1, 2, 3, 4), 3)
    assert rates.best_length(copy, [0.0, 0.1, 0.2, 0.3, 0.4]) == (4, pytest.approx(0.6 + 0.36 + 0.216 + 0.1296 - 0.4))
    assert rates.best_length(copy, [0.0, 0.1, 0.6, 0.8, 1.0]) == (1, pytest.approx(0.5))
    assert rates.best_length(copy, [0.0, 0.7, 1.4, 2.1, 2.8]) == (0, 0.0)
    assert rates.best_length(copy, [0.5, 0.6], reached=0.5) == (1, pytest.approx(0.2))
