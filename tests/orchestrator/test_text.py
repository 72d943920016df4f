"""Text for clients: no partial characters, no stop strings, the same for any grouping of tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.orchestrator.pairing.detokenizer import StopFinder, TextStream
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from tests.orchestrator.tiny_tokenizers import codec_of

CODEC = load_codec(find_model(str(TINY_TARGET)))
NO_ENDS: frozenset[int] = frozenset()
REPLACEMENT = "\ufffd"


def stream(stop=(), prompt=(0,), ends=NO_ENDS):
    return TextStream(CODEC.spelling, prompt, stop, ends)


def read(tokens, sizes, stop=()):
    """Returns the pieces of a text whose tokens arrive in groups of these sizes, including the piece at its end."""
    reader, at, pieces = stream(stop), 0, []
    for size in [*sizes, len(tokens)]:
        group, at = tokens[at : at + size], at + size
        if group:
            pieces.append(reader.feed(group))
        if pieces and pieces[-1].stopped:
            return pieces
    return [*pieces, reader.finish()]


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
sizes = st.lists(st.integers(1, 5), max_size=40)


@given(texts, sizes)
@settings(max_examples=200)
def test_pieces_are_whole_characters_and_add_up_to_the_text(text, sizes):
    pieces = read(CODEC.encode(text, special=False), sizes)
    assert "".join(piece.text for piece in pieces) == text
    assert all(REPLACEMENT not in piece.text for piece in pieces) or REPLACEMENT in text


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=60), sizes)
@settings(max_examples=200)
def test_text_does_not_depend_on_token_grouping(tokens, sizes):
    one = "".join(piece.text for piece in read(tokens, []))
    many = "".join(piece.text for piece in read(tokens, sizes))
    assert one == many == CODEC.decode(tuple(tokens))


def test_invalid_bytes_do_not_hold_back_the_text():
    continuation = CODEC.encode("你", special=False)[1]
    reader = stream()
    shown = "".join(reader.feed([continuation]).text for _ in range(12))
    assert len(shown) >= 8 and set(shown) == {REPLACEMENT}


@given(texts, texts, texts, sizes)
@example(before=REPLACEMENT, stop="\x80", after="0", sizes=[])
@settings(max_examples=200)
def test_stop_string_is_found_across_group_borders(before, stop, after, sizes):
    whole = before + stop + after
    tokens = CODEC.encode(whole, special=False)
    pieces = read(tokens, sizes, (stop,))
    assert pieces[-1].stopped
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    kept = [token for piece in pieces for token in piece.tokens]
    assert kept == list(tokens[: len(kept)]), "the tokens are the text's own"
    assert stop in CODEC.decode(tuple(kept)) and stop not in CODEC.decode(tuple(kept[:-1])).rstrip(REPLACEMENT)


@given(texts, sizes)
def test_partial_stop_string_is_released_at_the_end(text, sizes):
    pieces = read(CODEC.encode(text, special=False), sizes, (text + "!",))
    assert "".join(piece.text for piece in pieces) == text


def test_the_earliest_of_several_stop_strings_ends_the_text():
    finder = StopFinder(("world", "lo w"))
    assert finder.feed("hello world") == "hel" and finder.found


def test_end_token_counts_but_is_not_shown():
    piece = stream(ends=frozenset({0})).feed([*CODEC.encode("hi", special=False), 0])
    assert piece.text == "hi" and piece.tokens[-1] == 0
    assert stream().feed([0]).text == "<|endoftext|>", "an ignored end is a token like any other"


def test_first_token_keeps_its_leading_space(spm_codec):
    prompt = spm_codec.encode("hello")
    assert spm_codec.decode(spm_codec.encode("world")) == "world", "alone, its space is lost"
    assert TextStream(spm_codec.spelling, prompt, (), NO_ENDS).feed(spm_codec.encode("world")).text == " world"


def test_character_split_between_prompt_and_output_is_shown():
    tokens = CODEC.encode("你", special=False)
    assert len(tokens) > 1
    reader = TextStream(CODEC.spelling, (0, *tokens[:1]), (), NO_ENDS)
    assert "".join(reader.feed([token]).text for token in tokens[1:]) == "你"


def test_replacement_character_at_the_prompt_end_is_not_repeated():
    prompt = CODEC.encode(f"what is {REPLACEMENT}", special=False)
    assert stream(prompt=prompt).feed(CODEC.encode("?", special=False)).text == "?"


def test_unknown_token_id_gives_no_text():
    assert stream().feed([CODEC.tokenizer.get_vocab_size() + 7]).text == ""


@pytest.fixture
def spm_codec():
    """A tokenizer like SentencePiece's: words include their leading space, and decoding drops the first space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"▁hello": 0, "▁world": 1}, unk_token="▁hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return codec_of(tokenizer)
