"""A tiny configuration of each of mlx-lm's model types, from `model_configs.json`.

mlx-lm ignores unknown fields of a configuration, so the fields under "every" build most types; "of" has the additional
fields of single types. "parts" are modules of mlx-lm's models that are not models, "text_of" the types with the
configuration of a text model inside, such as vision models. phi3small keeps its vocabulary size, because it writes at
the positions of unused tokens.
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
    """Returns the names of all of mlx-lm's model types, without aliases."""
    return sorted(m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__) if m.name not in _KNOWN["parts"])


def config_of(model_type: str, tied: bool | None = None) -> dict[str, Any]:
    """Returns a tiny configuration of this type, which mlx-lm may not be able to build.

    `tied`: whether the embeddings are also the output layer, for types with that setting; None: the usual value.
    """
    text = _TEXT_OF.get(model_type, model_type)
    settings = {**_EVERY, **_OF.get(text, {}), "model_type": text}
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    return {**settings, "model_type": model_type, "text_config": settings} if model_type in _TEXT_OF else settings
