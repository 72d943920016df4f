"""The way in which a model's texts are held: together where a self-check shows that each says what it says alone."""

from __future__ import annotations

import logging

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from outrider.engine.abilities import abilities
from outrider.engine.batchcheck import agrees
from outrider.engine.loading import LoadedModel
from outrider.engine.texts import FlatTexts, SeparateTexts, Texts
from outrider.protocol.errors import ModelError
from outrider.protocol.guard import first_line, named_errors

log = logging.getLogger(__name__)


def open_texts(model: LoadedModel) -> Texts:
    """No texts yet, for a target that serves several."""
    able = abilities(model)
    plain = model.attention_only and able.chains and not able.own_caches
    if plain and all(isinstance(cache, KVCache | RotatingKVCache) for cache in make_prompt_cache(model.model)):
        return FlatTexts(model.model) if _share_a_forward(model) else SeparateTexts(model.model)
    return SeparateTexts(model.model, able.own_caches)


def _share_a_forward(model: LoadedModel) -> bool:
    try:
        with named_errors("texts in one forward", logging.INFO):
            if agrees(model):
                return True
        reason = "its logits differ"
    except ModelError as error:
        reason = first_line(error)
    log.info("texts of a %s model go through it one after the other: %s", model.model_type, reason)
    return False
