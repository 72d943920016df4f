"""Heads that read the target: their kinds, and how a checkpoint's config.json shows that it is one.

Knows names only; what a head computes is in `drafters.heads`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

HEADS = ("dflash", "eagle3", "mtp", "redrafter", "early-exit")
OF_TARGET = ("mtp", "early-exit")
"""Those that a target's own repository may hold; the others lie in one of their own."""
AHEAD = ("dflash", "eagle3", "mtp", "redrafter")
"""Those that can draft in a process of their own, ahead of the target's rows."""
_WORDS = {"eagle3": ("eagle3", "peagle"), "dflash": ("dflash", "dspark")}
"""What an architecture's name holds, whichever kind of head it is."""
DRAFT_MODEL = "draft"
"""Names the draft model among drafters, in a process of its own or in the target's."""
NGRAM = "ngram"
"""Names what is copied from the text."""
JOINT = "+"
"""Between the names of two whose drafts are verified as one tree: draft workers, and one of the target's process."""
_SAME = ("hidden_size", "num_hidden_layers", "vocab_size")


def head_kind(config: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> str | None:
    """The kind of head that a checkpoint with this config.json holds; None: a model, or nothing that is known here.

    `target`: that of the model to draft for, which may have its own head (mtp) in its original repository.
    """
    named = [str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ())]
    for kind, words in _WORDS.items():
        if any(word in name.lower() for name in named for word in words):
            return kind
    if "recurrent_drafting" in str(config.get("model_type", "")):
        return "redrafter"
    if config.get("model_type") == "early_exit_adapter":
        return "early-exit"
    own, its = _text(config), _text(target or {})
    counts = [own.get(key) or 0 for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers")]
    return "mtp" if any(counts) and all(own.get(key) == its.get(key) for key in _SAME) else None


def in_process_head(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the names of a model's own head's tensors begin with in its original repository, by its config.json.

    DeepSeek's and GLM's heads are a layer behind the last one.
    """
    count = _text(config).get("num_hidden_layers")
    return ("mtp.", "model.mtp_layers.", *([f"model.layers.{count}."] if count else []))


def is_joint(drafter: str) -> bool:
    """Whether this names two drafters of one tree."""
    return JOINT in drafter


def names_of(kinds: Iterable[str]) -> tuple[str, ...]:
    """What drafters of these kinds are called, in this order: of several of a kind all but the first have a number."""
    seen: Counter[str] = Counter()
    found = []
    for kind in kinds:
        seen[kind] += 1
        found.append(kind if seen[kind] == 1 else f"{kind}-{seen[kind]}")
    return tuple(found)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config
