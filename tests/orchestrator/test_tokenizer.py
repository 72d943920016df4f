"""Tokens of a text equal those of transformers, and all end tokens are known."""

from __future__ import annotations

import json
import threading

import pytest
from tokenizers import Tokenizer, models

from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec, read_default_sampling
from outrider.protocol.errors import InvalidRequest, ModelError
from tests.orchestrator.tiny_tokenizers import BYTE_FALLBACK, byte_fallback

TEXTS = ["def f(x):\n    return x\n", " leading", "héllo 你好 👩‍🔬", "<|endoftext|>tail", ""]


def change(folder, file, **fields):
    path = folder / file
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_tokens_match_transformers(model_folder, add_bos):
    from transformers import AutoTokenizer

    if add_bos is not None:
        change(model_folder, "tokenizer_config.json", add_bos_token=add_bos)
    codec, theirs = load_codec(find_model(str(model_folder))), AutoTokenizer.from_pretrained(str(model_folder))
    for text in TEXTS:
        # mlx-lm adds nothing to a text that begins with the first token already
        expected = theirs.encode(text, add_special_tokens=not text.startswith("<|endoftext|>"))
        assert codec.encode(text) == tuple(expected)
        assert codec.encode(text, special=False) == tuple(theirs.encode(text, add_special_tokens=False))
        assert codec.decode(tuple(expected)) == theirs.decode(expected)


SPACES = ["hello", " hello", "  hello", "x<s> hello", "x</s>hello", "\nhe", " ", "é 你"]


@pytest.mark.parametrize("layout", BYTE_FALLBACK)
@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
        {"tokenizer_class": "GemmaTokenizer"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {},
    ],
)
def test_leading_spaces_match_transformers(model_folder, layout, config):
    """In transformers, a family's tokenizer class may build a new tokenizer with only the vocabulary of the file."""
    from transformers import AutoTokenizer

    byte_fallback(BYTE_FALLBACK[layout]).save(str(model_folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model_folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    codec, theirs = load_codec(find_model(str(model_folder))), AutoTokenizer.from_pretrained(str(model_folder))
    for text in SPACES:
        assert codec.encode(text) == tuple(theirs.encode(text))
        assert codec.encode(text, special=False) == tuple(theirs.encode(text, add_special_tokens=False))


def test_tokenizer_refused_by_transformers_is_read_from_its_file(model_folder):
    tokenizer = byte_fallback(BYTE_FALLBACK["llama"])
    tokenizer.save(str(model_folder / "tokenizer.json"))
    change(model_folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Slow", "own.Fast"]})
    change(model_folder, "config.json", model_type="unheard_of")
    assert load_codec(find_model(str(model_folder))).encode(" hello", special=False) == tuple(
        tokenizer.encode(" hello").ids
    )


@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens.json", "eos_token"])
def test_tokens_that_tokenizer_json_lacks_are_added_as_by_transformers(model_folder, place):
    """Otherwise such a token would be split in a prompt, and a text would not show it or not end at it."""
    from transformers import AutoTokenizer

    if place == "added_tokens_decoder":
        change(model_folder, "tokenizer_config.json", added_tokens_decoder={"4096": {"content": "<|new|>"}})
    elif place == "eos_token":
        change(model_folder, "tokenizer_config.json", eos_token="<|new|>")
    else:
        change(model_folder, place, **{"<|new|>": 4096})
    codec, theirs = load_codec(find_model(str(model_folder))), AutoTokenizer.from_pretrained(str(model_folder))
    tokens = codec.encode("x<|new|>y", special=False)
    assert tokens == tuple(theirs.encode("x<|new|>y", add_special_tokens=False)) and 4096 in tokens
    assert codec.decode(tokens) == "x<|new|>y" and codec.spelling.of(4096) == b"<|new|>"
    assert (4096 in codec.eos) == (place == "eos_token")


def test_text_that_the_tokenizer_refuses_ends_only_its_request(model_folder):
    """The tokenizers library raises a plain Exception, which must not end the server."""
    Tokenizer(models.WordPiece({"he": 0}, unk_token="[UNK]")).save(str(model_folder / "tokenizer.json"))
    (model_folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    codec = load_codec(find_model(str(model_folder)))
    assert codec.encode("he") == (0,)
    with pytest.raises(InvalidRequest, match=r"can't be encoded \(WordPiece error: Missing \[UNK\]"):
        codec.encode("é")


def test_tokenizer_that_its_family_can_not_read_is_read_from_its_file(model_folder):
    """BigBird's class, which needs its own special tokens, raises UnboundLocalError."""
    byte_fallback(BYTE_FALLBACK["llama"]).save(str(model_folder / "tokenizer.json"))
    (model_folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BigBirdTokenizer"}')
    assert load_codec(find_model(str(model_folder))).encode("he", special=False)


def test_end_tokens_come_from_generation_config_config_and_tokenizer(model_folder):
    def ends():
        return load_codec(find_model(str(model_folder))).eos

    assert ends() == {0}
    change(model_folder, "config.json", eos_token_id=None, text_config={"eos_token_id": 9})
    assert ends() == {0, 9}, "where transformers 5 saves those of a model with images"
    change(model_folder, "config.json", text_config=["not an object"])
    assert ends() == {0}
    change(model_folder, "config.json", eos_token_id=[5, 6])
    assert ends() == {0, 5, 6}
    change(model_folder, "generation_config.json", eos_token_id=7)
    assert ends() == {0, 7}, "generation_config.json takes config.json's place, as in mlx-lm"
    change(model_folder, "generation_config.json", eos_token_id=[8, -1, 2**31, True])
    assert ends() == {0, 8}, "other numbers can't be sent in messages"
    change(model_folder, "generation_config.json", eos_token_id=-1)
    assert ends() == {0, 5, 6}


def test_recommended_sampling_is_read_except_for_values_out_of_range(model_folder):
    def sampling():
        return read_default_sampling(model_folder)

    assert sampling() == {}
    change(model_folder, "generation_config.json", temperature=0.6, top_p=0.95, top_k=20, min_p=None, do_sample=True)
    assert sampling() == {"temp": 0.6, "top_p": 0.95, "top_k": 20}
    change(model_folder, "generation_config.json", temperature="warm", top_p=7, top_k=-1)
    assert sampling() == {}
    change(model_folder, "generation_config.json", temperature=0.6, do_sample=False)
    assert sampling() == {}


def test_a_model_that_is_to_sample_has_the_temperature_of_transformers(model_folder):
    """Gemma 3 and gpt-oss name no temperature, but are not meant to be greedy."""
    change(model_folder, "generation_config.json", do_sample=True, top_k=64, repetition_penalty=1.05)
    recommended = {"temp": 1.0, "top_k": 64, "repetition_penalty": 1.05}
    assert read_default_sampling(model_folder) == recommended
    change(model_folder, "generation_config.json", temperature=0.7)
    assert read_default_sampling(model_folder) == {**recommended, "temp": 0.7}


def test_truncation_in_the_file_does_not_cut_a_prompt(model_folder):
    change(model_folder, "tokenizer.json", truncation={
        "max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"
    })  # fmt: skip
    assert len(load_codec(find_model(str(model_folder))).encode("x " * 50)) > 40


def test_special_tokens_may_be_objects(model_folder):
    change(model_folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    assert load_codec(find_model(str(model_folder))).eos == {0}


def test_unreadable_tokenizer_raises_model_error(model_folder):
    (model_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="expected a file of the tokenizers library"):
        load_codec(find_model(str(model_folder)))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_half_a_surrogate_pair_in_a_tokenizers_file_raises_model_error(model_folder, file):
    change(model_folder, file, **{"eos_token": "\ud83d"} if file != "added_tokens.json" else {"\ud83d": 5})
    with pytest.raises(ModelError, match=rf"{file} can't be read as JSON \(.*surrogates not allowed\); download"):
        load_codec(find_model(str(model_folder)))


def test_missing_tokenizer_raises_model_error(model_folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_codec(find_model(str(model_folder)))


def test_text_that_is_not_unicode_is_refused(model_folder):
    with pytest.raises(InvalidRequest, match="can't be encoded as UTF-8"):
        load_codec(find_model(str(model_folder))).encode("half a pair \ud83d")


def test_other_threads_run_while_a_long_text_is_tokenized():
    """Rounds and streams run in such threads. Otherwise they would pause for seconds for a long prompt."""
    codec = load_codec(find_model(str(TINY_TARGET)))
    text = "def fibonacci(n):\n    return n\n" * 6000
    inside, ended, seen = threading.Event(), threading.Event(), []

    def watch():
        inside.wait()
        seen.append(not ended.is_set())

    watching = threading.Thread(target=watch)
    watching.start()
    inside.set()
    tokens = codec.encode(text, special=False)
    ended.set()
    watching.join()
    assert seen == [True] and codec.decode(tokens) == text
