"""The bytes that each token stands for inside a text, so that a text can be put together token by token.

A decoder of the tokenizers library sees a text whole: it turns a run of byte tokens into U+FFFD, all of it, while one
character in it is incomplete, and drops the space a text begins with. Knows a tokenizer; knows nothing of streams.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

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
