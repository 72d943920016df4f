"""Random streams of tokens of every tokenizer layout become exactly their text, and no text is retracted.

OUTRIDER_FUZZ=20000 runs that many streams of byte-fallback layouts, and as many of byte-level layouts.
"""

from __future__ import annotations

import os
from functools import cache
from random import Random

import pytest

from outrider.orchestrator.pairing.detokenizer import TextStream
from tests.orchestrator.tiny_tokenizers import BYTE_FALLBACK, LAYOUTS, KnownTokenizer, make_tokenizer, random_text

STREAMS = int(os.environ.get("OUTRIDER_FUZZ", "240"))
LEVEL = ("byte level", "tiny pair")
NO_ENDS: frozenset[int] = frozenset()

cached_tokenizer = cache(make_tokenizer)


def streams(layout: str, share: float = 1.0) -> range:
    """Returns the seeds for a layout. Byte-fallback layouts share STREAMS seeds, and so do byte-level layouts."""
    layouts = LEVEL if layout in LEVEL else tuple(BYTE_FALLBACK)
    return range(max(1, round(share * STREAMS / len(layouts))))


def chunks(tokens: list[int], random: Random) -> list[list[int]]:
    cuts = sorted(random.choices(range(len(tokens) + 1), k=random.randint(0, len(tokens))))
    return [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def read(
    one: KnownTokenizer, prompt: list[int], groups: list[list[int]], stop: tuple[str, ...] = ()
) -> tuple[str, int, bool]:
    """Returns the text of a stream, the number of its tokens, and whether a stop string ended it."""
    stream, shown, taken = TextStream(one.codec.spelling, prompt, stop, NO_ENDS), "", 0
    for group in groups:
        piece = stream.feed(group)
        shown, taken = shown + piece.text, taken + len(piece.tokens)
        if piece.stopped:
            return shown, taken, True
    last = stream.finish()
    return shown + last.text, taken, last.stopped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_valid_text_is_unchanged_by_tokenization_and_grouping(layout):
    one = cached_tokenizer(layout)
    for seed in streams(layout):
        random = Random(seed)
        expected = random_text(random)
        tokens = one.tokens_of(expected, random)
        assert read(one, [1], chunks(tokens, random)) == (expected, len(tokens), False), (seed, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_complete_characters_are_shown_and_at_once(layout):
    one = cached_tokenizer(layout)
    for seed in streams(layout, 0.2):
        random = Random(seed)
        tokens = one.tokens_of(random_text(random), random)
        stream, shown = TextStream(one.codec.spelling, [1], (), NO_ENDS), ""
        for count, token in enumerate(tokens, start=1):
            shown += stream.feed([token]).text
            assert shown == one.spell(tokens[:count], "ignore")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_completes_a_prompt_cut_anywhere(layout):
    one = cached_tokenizer(layout)
    for seed in streams(layout):
        random = Random(seed)
        whole = random_text(random)
        tokens = one.tokens_of(whole, random)
        at = random.randint(1, len(tokens))
        before = one.spell(tokens[:at], "ignore")
        assert before + read(one, tokens[:at], chunks(tokens[at:], random))[0] == whole, (seed, tokens, at)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_string_ends_the_text_at_any_place_and_split(layout):
    one = cached_tokenizer(layout)
    for seed in streams(layout, 0.02):
        random = Random(seed)
        whole = random_text(random)[:8]
        tokens = one.tokens_of(whole, random)
        for start in range(len(whole)):
            for end in range(start + 1, len(whole) + 1):
                stop = whole[start:end]
                taken = next(n for n in range(len(tokens) + 1) if stop in one.spell(tokens[:n], "ignore"))
                for at in range(len(tokens) + 1):
                    found = read(one, [1], [tokens[:at], tokens[at:]], (stop,))
                    assert found == (whole[: whole.index(stop)], taken, True), (seed, tokens, at, stop)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shown_text_is_never_retracted_or_repeated(layout):
    """The text shown so far is always a prefix of the decoded bytes, with U+FFFD for invalid ones."""
    one = cached_tokenizer(layout)
    for seed in streams(layout):
        random = Random(seed)
        tokens = one.any_tokens(random)
        stream, shown, whole = TextStream(one.codec.spelling, [1], (), NO_ENDS), "", one.spell(tokens)
        for group in chunks(tokens, random):
            shown += stream.feed(group).text
            assert whole.startswith(shown), (seed, tokens)
        assert shown + stream.finish().text == whole, (seed, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_finished_text_equals_library_decoding(layout):
    """The text follows a prompt, so that its leading space is not dropped."""
    one = cached_tokenizer(layout)
    for seed in streams(layout):
        random = Random(seed)
        tokens = one.tokens_of(random_text(random), random) if layout in BYTE_FALLBACK else one.any_tokens(random)
        before, whole = one.codec.decode((1,)), one.codec.decode((1, *tokens))
        assert before + read(one, [1], [tokens])[0] == whole, (seed, tokens)
