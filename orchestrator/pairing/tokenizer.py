"""Text to tokens and back: the tokenizer, the bytes of each token, and whether two models mean the same by it.

`TextCodec`: text to tokens and which tokens end a text. Uses `tokenizers` alone for a byte-level tokenizer.json. Knows
a model's folder; knows nothing of requests or streams (`text`) and of chat templates (`chat`).

`Spelling`: the bytes that each token stands for inside a text, so that a text can be put together token by token. A
decoder of the tokenizers library sees a text whole: it turns a run of byte tokens into U+FFFD, all of it, while one
character in it is incomplete, and drops the space a text begins with. Knows a tokenizer; knows nothing of streams.

`VocabularyComparison`: do two models mean the same by the same token? What a draft must share with its target. Knows
tokenizers; knows nothing of processes. How text is split makes no difference (only the target's tokenizer splits any),
nor does padding: embedding rows beyond the last token, and tokens that are named as reserved or unused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from outrider.orchestrator.pairing.model_files import ModelFiles, read_json
from outrider.protocol.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """One tokenizer's. Byte-level tokens are spelled with the alphabet of bytes, byte-fallback ones as <0x41>; any
    other token stands for what decoding it behind another one adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = decoder_kinds(tokenizer)
        self._alphabet = _alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        tokens = range(tokenizer.get_vocab_size())
        self._before = next((token for token in tokens if self._decode(token).strip()), 0)
        self._skip = len(self._decode(self._before))

    def of(self, token: int) -> bytes:
        """What `token` adds to a text; none for an id without a token. May begin or end inside a character."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._alphabet is not None:
            known = all(letter in self._alphabet for letter in name)
            return bytes(self._alphabet[letter] for letter in name) if known else name.encode()
        byte = _BYTE.fullmatch(name) if self._has_byte_tokens else None
        return bytes.fromhex(byte[1]) if byte else self._decode(self._before, token)[self._skip :].encode()

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """The steps by which it decodes, as tokenizer.json names them."""
    if tokenizer.decoder is None:
        return frozenset()
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(one["type"] for one in described.get("decoders", [described]))


def _alphabet() -> dict[str, int]:
    """The letter of each byte: printable bytes are their own, the rest have letters from U+0100 on, in order."""
    letters = sorted(ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    rest = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(letters[len(own) :], rest, strict=True))


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


SAMPLES = 3
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_FILLER = re.compile(r"reserved|unused|placeholder|dummy|extra_\d|extra_id|^\W*control_\d|^\W*pad\W*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """How two vocabularies compare: tokens in both, and in words how they differ (empty: they don't)."""

    shared: int
    difference: str


def compare(target: TextCodec, draft: TextCodec) -> VocabularyComparison:
    """Compares what each token id stands for in one and in the other."""
    ours, theirs = _by_id(target), _by_id(draft)
    shared = ours.keys() & theirs.keys()
    unlike = sorted(i for i in shared if ours[i] != theirs[i] and not (_is_filler(ours[i]) or _is_filler(theirs[i])))
    if unlike:
        samples = ", ".join(f"{i} is {ours[i]!r} and {theirs[i]!r}" for i in unlike[:SAMPLES])
        told = f"{len(unlike)} of {len(shared)} tokens differ, such as {samples}"
        return VocabularyComparison(len(shared), told)
    for one, other, whose in ((ours, theirs, "the target's"), (theirs, ours, "the draft's")):
        alone = sorted(i for i in one.keys() - other.keys() if not _is_filler(one[i]))
        if alone:
            samples = ", ".join(f"{i} ({one[i]!r})" for i in alone[:SAMPLES])
            return VocabularyComparison(
                len(shared), f"{len(alone)} tokens are only in {whose} vocabulary, such as {samples}"
            )
    return VocabularyComparison(len(shared), "")


def require_same(target: TextCodec, draft: TextCodec) -> None:
    """Refuses a draft whose tokens mean something else.

    Raises:
        ModelError: they do; the message says how.
    """
    difference = compare(target, draft).difference
    if difference:
        raise ModelError(
            f"the vocabularies of {target.model.name} and {draft.model.name} differ: {difference};"
            " use a draft model of the target's family (`outrider pairs` lists some)"
        )


def fingerprint(codec: TextCodec) -> str:
    """A digest of what the tokens stand for, equal on two machines whose models mean the same by them.

    Without names in brackets, in which models of one family differ and which are what `compare` lets pass, mostly.
    """
    ordinary = [(i, token) for i, token in _by_id(codec).items() if not _BRACKETED.fullmatch(token)]
    return hashlib.sha256(repr(sorted(ordinary)).encode()).hexdigest()[:32]


def _by_id(codec: TextCodec) -> dict[int, str]:
    return {token_id: token for token, token_id in codec.tokenizer.get_vocab(with_added_tokens=True).items()}


def _is_filler(token: str) -> bool:
    return bool(_FILLER.search(token)) and token.startswith(("<", "["))
