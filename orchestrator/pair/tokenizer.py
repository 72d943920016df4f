"""Text to tokens and which tokens end a text. Uses `tokenizers` alone for a byte-level tokenizer.json.

Knows a model's folder; knows nothing of requests or streams (`text`) and of chat templates (`chat`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.orchestrator.pair.model_files import ModelFiles, read_json
from outrider.orchestrator.pair.spelling import Spelling, decoder_kinds
from outrider.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A model's tokenizer. `eos` ends a text; `special` are the texts of bos_token, eos_token and so on.

    `decode` is the library's view of a whole text, `spelling` that of a text that is still being written.
    """

    model: ModelFiles
    tokenizer: Tokenizer
    eos: frozenset[int]
    special: dict[str, str]
    spelling: Spelling

    def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """The tokens of `text`. `special` adds what tokenizer.json wants around a text, if the text has it not yet.

        Other threads go on meanwhile: the library lets go of the interpreter for a batch, and for a single text not.
        """
        first = self.special.get("bos_token")
        begun = first is not None and text.startswith(first)
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special and not begun)
        return tuple(found.ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of `tokens`, special ones spelled out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_codec(model: ModelFiles) -> TextCodec:
    """The tokenizer in a model's folder.

    Raises:
        ModelError: there is none, or it can't be read.
    """
    config = read_json(model.folder / "tokenizer_config.json")
    tokenizer = _tokenizer(model)
    special = _special_tokens(model.folder, config)
    eos = special.get("eos_token")
    ends = _ids(read_json(model.folder / "generation_config.json").get("eos_token_id"))
    ends = ends or _ids(read_json(model.folder / "config.json").get("eos_token_id"))
    if eos is not None:
        ends |= _ids(tokenizer.token_to_id(eos))
    return TextCodec(model=model, tokenizer=tokenizer, eos=ends, special=special, spelling=Spelling(tokenizer))


def _tokenizer(model: ModelFiles) -> Tokenizer:
    path = model.folder / "tokenizer.json"
    if path.is_file():
        tokenizer = _from_file(path)
        if "ByteLevel" not in decoder_kinds(tokenizer):
            with suppress(ModelError):  # then mlx-lm has no other tokens either
                tokenizer = _by_transformers(model)
    else:
        tokenizer = _by_transformers(model)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"{path} can't be read ({error}); expected a tokenizer of the tokenizers library") from None


def _by_transformers(model: ModelFiles) -> Tokenizer:
    """What transformers, and so mlx-lm, takes for this model's tokenizer.

    Of a tokenizer in SentencePiece's manner the family's class there takes the vocabulary alone and decides by itself
    where spaces go; without a tokenizer.json one is made from older files, if that can be done.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer  # deferred: takes more than a second

    try:
        loaded = AutoTokenizer.from_pretrained(str(model.folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model.name} has no readable tokenizer ({str(error).partition(chr(10))[0]})") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(f"{model.name} has a tokenizer without a tokenizer.json; convert it to one first")
    return backend


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _ids(value: object) -> frozenset[int]:
    many = value if isinstance(value, list) else [value]
    return frozenset(one for one in many if isinstance(one, int) and not isinstance(one, bool))
