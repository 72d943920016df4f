"""A model's text side without its weights: the tokenizer, and prompts as tokens.

Needs only the tokenizers library for a byte-level tokenizer.json. Knows a model's folder; knows nothing of requests,
sockets and rounds.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.orchestrator.pairing.chat_template import Message, chat_template, join_messages, render_template
from outrider.orchestrator.pairing.detokenizer import Spelling, decoder_kinds
from outrider.orchestrator.pairing.model_files import ModelFiles
from outrider.protocol.digest import read_json
from outrider.protocol.errors import InvalidRequest, ModelError, first_line
from outrider.protocol.heads import text_config
from outrider.protocol.sampling import SamplingParams

MAX_SAMPLES = 3
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A model's tokenizer. `eos`: tokens that end a text; `special`: the texts of bos_token, eos_token and so on.

    `decode` is for complete texts, `spelling` for texts in progress. `template`: the chat template; None if there is
    none, or it is not to be used.
    """

    model: ModelFiles
    tokenizer: Tokenizer
    eos: frozenset[int]
    special: dict[str, str]
    spelling: Spelling
    template: str | None = None

    def encode_prompt(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens of a user's text, or of a conversation to answer.

        Without a template the text is used as it is, and messages become one text for the model to continue.

        Raises:
            ModelError: the template refuses the messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.template is None:
            return self.encode(join_messages(messages))
        return self.encode(render_template(self.template, messages, self.special), special=False)

    def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Returns the tokens of `text`. `special` adds tokenizer.json's tokens around it, unless it begins with bos.

        Encodes a batch of one, since the library releases the GIL for a batch, and does not for a single text.
        """
        bos = self.special.get("bos_token")
        begun = bos is not None and text.startswith(bos)
        try:
            (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special and not begun)
        except TypeError:  # half a surrogate pair, or a byte of a terminal or command line that is not UTF-8
            raise InvalidRequest("the text can't be encoded as UTF-8; expected Unicode text") from None
        except Exception as error:  # tokenizers raises no narrower class
            raise InvalidRequest(
                f"the text can't be encoded ({first_line(error)}); expected characters that the tokenizer knows"
            ) from None
        return tuple(encoding.ids)

    def end_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a text and are not part of it."""
        return frozenset() if sampling.ignore_eos else self.eos

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Returns the text of `tokens`, including special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_codec(model: ModelFiles, template: bool = False) -> TextCodec:
    """Loads the tokenizer in a model's folder; `template`: with its chat template.

    Raises:
        ModelError: there is no tokenizer, or its files can't be read.
    """
    used = chat_template(model.folder) if template else None
    config = read_json(model.folder / "tokenizer_config.json")
    special = _read_special_tokens(model.folder, config)
    tokenizer = _load_tokenizer(model, [*special.values(), *_read_added_tokens(model.folder, config)])
    sizes, generation = (read_json(model.folder / name) for name in ("config.json", "generation_config.json"))
    places = (generation, sizes, text_config(sizes))
    ends = next(filter(None, (_token_set(place.get("eos_token_id")) for place in places)), frozenset[int]())
    if "eos_token" in special:
        ends |= _token_set(tokenizer.token_to_id(special["eos_token"]))
    return TextCodec(model, tokenizer, ends, special, Spelling(tokenizer), used)


def _load_tokenizer(model: ModelFiles, named: Sequence[str]) -> Tokenizer:
    """Loads the tokenizer with all tokens that other files name: transformers adds those that tokenizer.json lacks."""
    path = model.folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower class
            raise ModelError(f"{path} can't be read ({error}); expected a file of the tokenizers library") from None
        if "ByteLevel" not in decoder_kinds(tokenizer) or None in map(tokenizer.token_to_id, named):
            with suppress(ModelError):  # in which case mlx-lm has no other tokenizer, either
                tokenizer = _load_with_transformers(model)
    else:
        tokenizer = _load_with_transformers(model)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_with_transformers(model: ModelFiles) -> Tokenizer:
    """Loads the tokenizer as transformers, and so mlx-lm, does.

    For SentencePiece, its class uses only the vocabulary of tokenizer.json, and has its own rules for spaces;
    without a tokenizer.json it converts older files, if it can.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer  # deferred: takes more than a second

    try:
        loaded = AutoTokenizer.from_pretrained(str(model.folder), trust_remote_code=False)
    except Exception as error:  # transformers has a class for each family, which may raise anything
        raise ModelError(
            f"{model.name} has no readable tokenizer ({first_line(error)}); expected tokenizer.json in its folder"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(f"{model.name} has a tokenizer without a tokenizer.json; convert it to tokenizer.json first")
    return backend


def _read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    return {name: text for name in _SPECIAL_TOKENS if (text := _token_text(merged.get(name))) is not None}


def _read_added_tokens(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns the tokens that were added to a vocabulary, as transformers 4 lists them besides tokenizer.json."""
    listed = config.get("added_tokens_decoder")
    texts = map(_token_text, listed.values() if isinstance(listed, dict) else ())
    return [*read_json(folder / "added_tokens.json"), *(text for text in texts if text is not None)]


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _token_set(value: object) -> frozenset[int]:
    """Returns the tokens in a field of a config, which some fill with -1 if there is none."""
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if type(token) is int and token in range(2**31))


def require_same_vocabulary(target: TextCodec, draft: TextCodec) -> None:
    """Checks that each token id has the same text in both models. Raises ModelError, which says how they differ.

    How text is split does not matter (only the target's tokenizer splits text), nor do embeddings without a token.
    """
    ours, theirs = ordinary_tokens(target), ordinary_tokens(draft)
    if unlike := sorted({token for token, _ in ours.items() ^ theirs.items()}):
        samples = ", ".join(f"{i} is {ours.get(i, '')!r} and {theirs.get(i, '')!r}" for i in unlike[:MAX_SAMPLES])
        raise ModelError(
            f"the vocabularies of {target.model.name} and {draft.model.name} differ: {len(unlike)} tokens, such as"
            f" {samples}; use a draft model of the target's family (`outrider pairs` lists some)"
        )


def vocabulary_digest(codec: TextCodec) -> str:
    """Returns a digest of `ordinary_tokens`, to compare the vocabularies of models on two machines."""
    return hashlib.sha256(repr(sorted(ordinary_tokens(codec).items())).encode()).hexdigest()[:32]


def ordinary_tokens(codec: TextCodec) -> dict[int, str]:
    """Returns the text of each token id, without names in brackets, in which models of a family differ: reserved and
    unused tokens, and those of chat formats."""
    vocabulary = codec.tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items() if not _BRACKETED.fullmatch(token)}


_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_default_sampling(folder: Path) -> dict[str, float]:
    """Returns the values of SamplingParams in a model's generation_config.json, except for those out of range."""
    config = read_json(folder / "generation_config.json")
    if not config.get("do_sample", True):
        return {}
    if "do_sample" in config:  # then transformers and vLLM sample, at a temperature of 1 if there is no other
        config = {"temperature": 1.0, **config}
    found = dict[str, float]()
    for name in _SAMPLING_KEYS:
        with suppress(InvalidRequest):
            if config.get(name) is not None:
                SamplingParams(**{name: config[name]})
                found["temp" if name == "temperature" else name] = config[name]
    return found
