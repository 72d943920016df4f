"""The n-gram source copies what followed before, longest match first, and continues repetitive texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.orchestrator.core import proposal
from outrider.orchestrator.core.policy.estimates import Copy
from outrider.orchestrator.core.proposal import INDEX_PIECE_TOKENS, MAX_NGRAM_SIZE, MIN_NGRAM_SIZE, NgramIndex

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
    monkeypatch.setattr(proposal, "INDEX_WINDOW_TOKENS", 50)
    index = NgramIndex(range(1000))
    assert index.lookup(2, then=[960, 961]) == Copy((962, 963), 2)
    assert index.lookup(2, then=[900, 901]) == Copy()
    index.extend(range(2000, 2200))
    assert len(index._followed_at) <= 4 * 50
