"""Tiny tokenizers of every layout that can spell any text: a few words, all bytes, and each family's decoder."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from outrider.orchestrator.pairing.detokenizer import Spelling
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = (
    "▁", "▁▁", "▁▁▁", "▁h", "he", "▁the", "l", "o", "e", "h", "x", ".", "!", "ing", "é", "▁é", "你", "你好", "й", "😀",
)  # fmt: skip
# The characters of random texts: some with a token, some that only bytes can spell, and some that are easily confused.
LETTERS = "hexlo .!é你好й😀" + "aQ\n\tüß日本語क्ष👩‍🔬🇫🇷\ufffd\u0301\x00\x80\U0010ffff\ufeff"
SPACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
BYTE_FALLBACK = {
    "llama": decoders.Sequence([SPACE, BYTES, FUSE, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([SPACE, BYTES, FUSE]),
    "strip first": decoders.Sequence([BYTES, FUSE, decoders.Strip("▁", 1, 0), SPACE]),
    "metaspace": decoders.Sequence([BYTES, decoders.Metaspace()]),
}
LAYOUTS = (*BYTE_FALLBACK, "byte level", "tiny pair")


@dataclass(frozen=True, slots=True)
class KnownTokenizer:
    """A codec, and the bytes that each of its tokens spells, known from its construction. `wild` are not ASCII."""

    codec: TextCodec
    spelled: dict[int, bytes]
    by_bytes: dict[bytes, list[int]]
    wild: list[int]

    def tokens_of(self, text: str, random: Random) -> list[int]:
        """Returns a random way to spell `text`; tokens may begin and end inside a character."""
        whole, tokens = text.encode(), []
        while whole:
            sizes = [size for size in range(1, min(len(whole), 12) + 1) if whole[:size] in self.by_bytes]
            piece = whole[: random.choice(sizes)]
            tokens.append(random.choice(self.by_bytes[piece]))
            whole = whole[len(piece) :]
        return tokens

    def any_tokens(self, random: Random) -> list[int]:
        """Returns random tokens, mostly `wild` ones, which often spell invalid UTF-8."""
        every = range(len(self.spelled))
        return [random.choice(self.wild if random.random() < 0.7 else every) for _ in range(random.randint(1, 24))]

    def spell(self, tokens: list[int], errors: str = "replace") -> str:
        """Decodes these tokens as UTF-8. With `errors` "ignore", invalid and incomplete characters are left out."""
        return b"".join(self.spelled[token] for token in tokens).decode("utf-8", errors)


def random_text(random: Random) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randint(1, 16)))


def make_tokenizer(layout: str) -> KnownTokenizer:
    if layout == "tiny pair":
        codec = load_codec(find_model(str(TINY_TARGET)))
        return _known_tokenizer(codec.tokenizer, _byte_level_spelling(codec.tokenizer))
    if layout == "byte level":
        tokenizer = byte_level()
        return _known_tokenizer(tokenizer, _byte_level_spelling(tokenizer))
    tokenizer = byte_fallback(BYTE_FALLBACK[layout])
    spelled = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    spelled |= {tokenizer.token_to_id(word): word.replace("▁", " ").encode() for word in (*SPECIAL, *WORDS)}
    return _known_tokenizer(tokenizer, spelled)


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """Returns a tokenizer as in Llama 2, Mistral and Gemma: words with ▁ for a space, and a token for each byte."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return tokenizer


def byte_level() -> Tokenizer:
    """Returns a tokenizer as in GPT-2 and its successors, with tokens that end inside characters, and added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {step.pre_tokenize_str(word)[0][0] for word in (" the", "你好", "😀😀", "é", "语", " 👩‍🔬")}
    cut = {piece[at:] for piece in pieces for at in range(len(piece))} | {piece[:2] for piece in pieces}
    vocabulary = {name: number for number, name in enumerate([*letters, *sorted((pieces | cut) - {""} - set(letters))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = step, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end of 日|>", normalized=False)])
    return tokenizer


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(find_model(str(TINY_TARGET)), tokenizer, frozenset(), {}, Spelling(tokenizer))


def _known_tokenizer(tokenizer: Tokenizer, spelled: dict[int, bytes]) -> KnownTokenizer:
    by_bytes: dict[bytes, list[int]] = {}
    for token, piece in spelled.items():
        by_bytes.setdefault(piece, []).append(token)
    wild = [token for token, piece in spelled.items() if not piece.isascii()]
    return KnownTokenizer(codec_of(tokenizer), spelled, by_bytes, wild)


def _byte_level_spelling(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Returns the bytes of each token, from the letter that the encoder has for each byte.

    Bytes that occur in no UTF-8 character are printable in Latin-1, so their letters are themselves.
    """
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {chr(byte): byte for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    for code in [*range(0x800), *range(0x800, 0xD800, 0x40), *range(0xE000, 0x110000, 0x40)]:
        letters.update(zip(step.pre_tokenize_str(chr(code))[0][0], chr(code).encode(), strict=True))
    spelled = {}
    for token in range(tokenizer.get_vocab_size()):
        name = tokenizer.id_to_token(token)
        known = all(letter in letters for letter in name)
        spelled[token] = bytes(letters[letter] for letter in name) if known else name.encode()
    return spelled
