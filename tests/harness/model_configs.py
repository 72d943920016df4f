"""A tiny configuration of each of mlx-lm's model types, from `model_configs.json`.

mlx-lm takes from a configuration what it knows by name, so what stands under "every" there builds most types; "of" has
what a type needs besides. "parts" are modules among mlx-lm's models that are none, "text_of" the types whose
configuration holds another one: a model with eyes around one of text. phi3small keeps its vocabulary, since it writes
at the places of unused tokens. Knows names and sizes only.
"""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import mlx_lm.models

_KNOWN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_EVERY, _OF, _TEXT_OF = _KNOWN["every"], _KNOWN["of"], _KNOWN["text_of"]
WINDOW: int = _EVERY["sliding_window"]


def model_types() -> list[str]:
    """The names of all of mlx-lm's model types that a configuration may give, aliases left out."""
    return sorted(m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__) if m.name not in _KNOWN["parts"])


def config_of(model_type: str, tied: bool | None = None) -> dict[str, Any]:
    """A tiny configuration of this type; that mlx-lm can build it is not promised.

    `tied`: whether the embeddings are the output layer, too, for types that ask; None: as most are.
    """
    text = _TEXT_OF.get(model_type, model_type)
    settings = {**_EVERY, **_OF.get(text, {}), "model_type": text}
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    return {**settings, "model_type": model_type, "text_config": settings} if model_type in _TEXT_OF else settings
