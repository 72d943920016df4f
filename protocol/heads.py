"""The names of drafters, and what a checkpoint's config.json says of it: its kind of head and its context length.

Knows names only; `drafters.heads` computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from outrider.protocol.sampling import MAX_COUNT

WORKER_HEADS = ("dflash", "eagle3", "mtp", "redrafter")
"""Heads that can draft in their own process, before the target's rows arrive."""
HEAD_KINDS = (*WORKER_HEADS, "early-exit")
TARGET_HEADS = ("mtp", "early-exit")
"""Heads that may be part of a target's own repository; the others have repositories of their own."""
_ARCHITECTURE_WORDS = {"eagle3": ("eagle3", "peagle"), "dflash": ("dflash", "dspark", "domino")}
"""Parts of an architecture's name that show the kind of head."""
DRAFTER_BACKENDS = ("mlx", "coreml")
"""Drafters of draft workers that are no heads, as users and `drafters.drafter.make_drafter` name them."""
DRAFT_MODEL = "draft"
"""The draft model's name among drafters, in its own process or in the target's."""
NGRAM = "ngram"
"""The name of the drafter that copies n-grams of the text."""
JOINT_SEPARATOR = "+"
"""Joins the names of two drafters whose drafts are verified as one tree: the draft workers and one in the target."""
_CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx",
)  # fmt: skip
_SHARED_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def head_kind(config: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> str | None:
    """Returns the kind of head in a checkpoint with this config.json; None for a model, or an unknown kind.

    `target`: the target's config.json; its original repository may have its own head (mtp).
    """
    named = f"{config.get('speculators_model_type')} {config.get('architectures')}".lower()
    for kind, words in _ARCHITECTURE_WORDS.items():
        if any(word in named for word in words):
            return kind
    if "recurrent_drafting" in str(config.get("model_type", "")):
        return "redrafter"
    if config.get("model_type") == "early_exit_adapter":
        return "early-exit"
    ours, theirs = text_config(config), text_config(target or {})
    counts = [ours.get(key) or 0 for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers")]
    return "mtp" if any(counts) and all(ours.get(key) == theirs.get(key) for key in _SHARED_SIZES) else None


def head_tensor_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the name prefixes of the tensors of a model's own head in its original repository, by its config.json.

    The heads of DeepSeek and GLM are stored as one more layer after the last.
    """
    count = text_config(config).get("num_hidden_layers")
    return ("mtp.", "model.mtp_layers.", *([f"model.layers.{count}."] if count else []))


def unique_names(kinds: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of drafters of these kinds, in this order; the second of a kind gets "-2", and so on."""
    seen: Counter[str] = Counter()
    names = []
    for kind in kinds:
        seen[kind] += 1
        names.append(kind if seen[kind] == 1 else f"{kind}-{seen[kind]}")
    return tuple(names)


def context_length(config: Mapping[str, Any]) -> int:
    """Returns the tokens that a model's context holds, by its config.json; 32,768 if that does not say.

    YaRN stretches the context that it names: who adds it for long texts leaves `max_position_embeddings` as it is.
    """
    config = {**config, **text_config(config)}
    lengths = [config[key] for key in _CONTEXT_LENGTH_KEYS if type(config.get(key)) is int and config[key] > 0][:1]
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            lengths.append(int(scaling["factor"] * scaling["original_max_position_embeddings"]))
    return min(max(lengths, default=32768), MAX_COUNT)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a model's text part: of a model with images, those in `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config
