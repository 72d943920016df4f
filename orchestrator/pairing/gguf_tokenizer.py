"""Converts a GGUF file's tokenizer to tokenizer.json, with its chat template.

Two kinds: byte-level BPE ("gpt2"), with merges and the name of the pre-tokenizer in the file; and SentencePiece's BPE
("llama"), whose merges follow from the vocabulary. Knows the metadata; knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.orchestrator.pairing.chat_template import TOOL_TEMPLATE
from outrider.orchestrator.pairing.gguf import GgufFile
from outrider.protocol.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_LLAMA_3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN = _WORDS.replace("{0}", "") + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_GPT_4O = _WORDS.replace("{0}", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_SPLIT_PATTERNS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), None),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
}
"""The regular expression that splits text first; None: GPT-2's, which is built into the library."""
_DIGIT_SPLITTERS = ("smollm", "starcoder", "refact")
_LLAMA_3_PRE_TOKENIZERS = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral")
"""They keep a word whole if it is a token, whatever the merges produce, and a text begins with bos by default."""
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
    "<eos>",
})  # fmt: skip
"""Tokens that end an answer and are never text, whatever their type in the file, as in llama.cpp."""
_SPACE = "\u2581"
_BEFORE_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi 3's special tokens, those that do not take in the spaces and line breaks after them, which no file says."""


def write_tokenizer(file: GgufFile, folder: Path, vocabulary: int) -> dict[str, int | list[int]]:
    """Writes tokenizer.json and tokenizer_config.json; returns the ids for config.json and generation_config.json.

    `vocabulary`: the number of the model's embeddings.

    Raises:
        ModelError: the tokenizer is of another kind or incomplete.
    """
    kind, tokens = file.text("tokenizer.ggml.model"), file.texts("tokenizer.ggml.tokens")
    if len(tokens) > vocabulary:
        raise ModelError(f"{file.path} has {len(tokens)} tokens, but {vocabulary} embeddings; download it again")
    if len(set(tokens)) < len(tokens):
        raise ModelError(f"{file.path} has a token twice; choose another file of this model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{file.path} has a tokenizer of the kind {kind!r}; expected gpt2 or llama")
    types = file.numbers("tokenizer.ggml.token_type", len(tokens))
    typed = [_NORMAL] * len(tokens) if types is None else types.tolist()
    typed = [_CONTROL if token in _END_TOKENS else kind for token, kind in zip(tokens, typed, strict=True)]
    tokenizer = _byte_level_tokenizer(file, tokens) if kind == "gpt2" else _sentencepiece_tokenizer(file, tokens, typed)
    is_phi_3 = file.architecture == "phi3" and kind == "llama"
    added = [
        AddedToken(token, special=of == _CONTROL, normalized=False, rstrip=is_phi_3 and token not in _BEFORE_SPACES)
        for token, of in zip(tokens, typed, strict=True)
        if of in (_CONTROL, _USER_DEFINED) and tokenizer.token_to_id(token) is not None
    ]
    tokenizer.add_tokens(added)  # without Gemma's runs of spaces, which merges make of their own tokens
    special = _special_ids(file, tokens)
    tokenizer.post_processor = _post_processor(file, tokens, special, kind)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = json.dumps(_tokenizer_config(file, tokens, special), indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return _config_ids(tokens, special)


def _byte_level_tokenizer(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLIT_PATTERNS and pre not in _DIGIT_SPLITTERS:
        known = ", ".join(sorted({*_SPLIT_PATTERNS, *_DIGIT_SPLITTERS}))
        raise ModelError(f"{file.path} has the pre-tokenizer {pre!r}; expected one of {known}")
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [_parse_merge(file, merge, vocabulary) for merge in file.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA_3_PRE_TOKENIZERS))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split, steps = _SPLIT_PATTERNS.get(pre), list[pre_tokenizers.PreTokenizer]()
    if pre in _DIGIT_SPLITTERS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parse_merge(file: GgufFile, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise ModelError(f"{file.path} has the merge {merge!r}, which does not make a token; download it again")
    return left, right


def _sentencepiece_tokenizer(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Returns the tokenizer. Gemma's stores runs of spaces as spaces, and ranks merges by token id."""
    gemma = file.architecture.startswith("gemma")
    spelled = [_SPACE * len(token) if gemma and token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: place for place, token in enumerate(spelled)}
    scores = file.numbers("tokenizer.ggml.scores", len(tokens))
    by_place = gemma or scores is None
    rank = {token: float(place) if by_place else -float(scores[place]) for token, place in vocabulary.items()}  # type: ignore[index]
    unknown = next((token for token, kind in zip(spelled, types, strict=True) if kind == _UNKNOWN), None)
    bpe = models.BPE(
        vocab=vocabulary,
        merges=_derive_merges(vocabulary, rank),
        fuse_unk=True,
        byte_fallback="<0x00>" in vocabulary,
        unk_token=unknown,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _derive_merges(vocabulary: dict[str, int], rank: dict[str, float]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that form a token, best token first; for the same token, lower ids first."""
    ranked = []
    for token in vocabulary:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        ranked += [(rank[token], vocabulary[left], vocabulary[right], left, right) for left, right in merges]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _special_ids(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    """Returns the ids of tokens with a role, by Hugging Face's name of the role."""
    roles = {"bos_token": "bos", "eos_token": "eos", "eot_token": "eot", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in roles.items():
        token = file.whole(f"tokenizer.ggml.{key}_token_id", -1)
        if token in range(len(tokens)):
            special[name] = token
        elif token not in (-1, 2**32 - 1):  # the latter is -1 as an unsigned number
            raise ModelError(f"{file.path} has {len(tokens)} tokens, but its {name} is {token}; download it again")
    return special


def _config_ids(tokens: Sequence[str], special: dict[str, int]) -> dict[str, int | list[int]]:
    named = [special[role] for role in ("eos_token", "eot_token") if role in special]
    ends = [place for place, token in enumerate(tokens) if token in _END_TOKENS]
    ids: dict[str, int | list[int]] = {"eos_token_id": list(dict.fromkeys([*named, *ends]))}
    return ids | ({"bos_token_id": special["bos_token"]} if "bos_token" in special else {})


def _post_processor(
    file: GgufFile, tokens: Sequence[str], special: dict[str, int], kind: str
) -> processors.TemplateProcessing:
    """Returns what puts special tokens around a text that is not a conversation."""
    begins = kind == "llama" or file.text("tokenizer.ggml.pre", "") in _LLAMA_3_PRE_TOKENIZERS
    around = {
        "bos_token": file.flag("tokenizer.ggml.add_bos_token", begins),
        "eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
    }
    roles = [role for role, wanted in around.items() if wanted and role in special]
    return processors.TemplateProcessing(
        single=[piece for piece in ("bos_token", "$A", "eos_token") if piece in ("$A", *roles)],
        special_tokens=[{"id": role, "ids": [special[role]], "tokens": [tokens[special[role]]]} for role in roles],
    )


def _tokenizer_config(file: GgufFile, tokens: Sequence[str], special: dict[str, int]) -> dict[str, Any]:
    plain, with_tools = (file.text(f"tokenizer.chat_template{name}", "") for name in ("", f".{TOOL_TEMPLATE}"))
    named = [{"name": "default", "template": plain}, {"name": TOOL_TEMPLATE, "template": with_tools}]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[token] for name, token in special.items()},
        "model_max_length": file.whole(f"{file.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": named if with_tools else plain} if plain else {}),
    }
