"""Heads that read the target: their kinds, and by which words of its config.json a checkpoint is known for one.

Knows names only; what a head computes is `drafting.heads`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS = ("eagle3",)


def head_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of head that a checkpoint with this config.json holds; None: a model, or what nobody knows here."""
    named = [str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ())]
    return next((kind for kind in HEADS if any(kind in name.lower() for name in named)), None)
