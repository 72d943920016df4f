"""Tokenizers of every layout that spells text in bytes: a few words, all bytes, each family's decoder."""

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
# The parts of a text: letters with a token, letters that only bytes can spell, and what is easily mistaken.
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
class Kind:
    """A codec and what each of its tokens spells, known from how it was made."""

    codec: TextCodec
    spelled: dict[int, bytes]
    by_bytes: dict[bytes, list[int]]
    wild: list[int]

    def tokens_of(self, text: str, random: Random) -> list[int]:
        """One of all the ways to spell `text`: where pieces begin and end, inside characters too, is left to chance."""
        whole, tokens = text.encode(), []
        while whole:
            sizes = [size for size in range(1, min(len(whole), 12) + 1) if whole[:size] in self.by_bytes]
            piece = whole[: random.choice(sizes)]
            tokens.append(random.choice(self.by_bytes[piece]))
            whole = whole[len(piece) :]
        return tokens

    def any_tokens(self, random: Random) -> list[int]:
        """Tokens that spell no text, as likely as not: mostly `wild` ones, which are not all ASCII."""
        every = range(len(self.spelled))
        return [random.choice(self.wild if random.random() < 0.7 else every) for _ in range(random.randint(1, 24))]

    def spell(self, tokens: list[int], errors: str = "replace") -> str:
        """What these tokens are in UTF-8; `errors` "ignore" leaves out what is no character, or none yet."""
        return b"".join(self.spelled[token] for token in tokens).decode("utf-8", errors)


def text(random: Random) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randint(1, 16)))


def kind(layout: str) -> Kind:
    if layout == "tiny pair":
        codec = load_codec(find_model(str(TINY_TARGET)))
        return _kind(codec.tokenizer, _byte_level_spelling(codec.tokenizer))
    if layout == "byte level":
        tokenizer = byte_level()
        return _kind(tokenizer, _byte_level_spelling(tokenizer))
    tokenizer = byte_fallback(BYTE_FALLBACK[layout])
    spelled = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    spelled |= {tokenizer.token_to_id(word): word.replace("▁", " ").encode() for word in (*SPECIAL, *WORDS)}
    return _kind(tokenizer, spelled)


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """As in Llama 2, Mistral and Gemma: words with ▁ for a space, and a token for each byte."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return tokenizer


def byte_level() -> Tokenizer:
    """As in GPT-2 and all that came of it, with pieces that end inside characters, and tokens added behind."""
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


def _kind(tokenizer: Tokenizer, spelled: dict[int, bytes]) -> Kind:
    by_bytes: dict[bytes, list[int]] = {}
    for token, piece in spelled.items():
        by_bytes.setdefault(piece, []).append(token)
    wild = [token for token, piece in spelled.items() if not piece.isascii()]
    return Kind(codec_of(tokenizer), spelled, by_bytes, wild)


def _byte_level_spelling(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Asks the encoder what letter each byte has. The bytes that no character has are printable: their own letters."""
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
