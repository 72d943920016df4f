"""From a checkpoint to a drafter beside its target. A new kind of head is its forward, its files and a line here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlx.utils import tree_flatten

from outrider.drafting.heads import eagle3_files
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.pairing import agreement
from outrider.engine.loading import LoadedModel, find
from outrider.engine.parts import backbone_of, embedding
from outrider.protocol.errors import CannotDraft, OutriderError
from outrider.protocol.guard import named_errors

log = logging.getLogger(__name__)

_READ = {"eagle3": eagle3_files.read}


def load(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None], tried: bool = True) -> HeadDrafter:
    """The head of this kind at a path or Hugging Face id, for `model`; its `note` tells where that looks wrong.

    `tried`: on a text of the model's; not of one that several ranks share, whose forwards are all ranks' affair.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    try:
        folder = find(path, progress)
        progress(f"loading {path}")
        with named_errors(f"loading the head {path}"):
            table = embedding(backbone_of(model.model)[0])
            head = _READ[kind](folder, model.config, model.vocab_size, lambda tokens: table(tokens))
            doubt = ""
            if tried:
                progress("trying how head and target go together")
                doubt = agreement(head, model).doubt
    except CannotDraft:
        raise
    except OutriderError as error:
        raise CannotDraft(str(error)) from error
    if doubt:
        log.warning("%s", doubt)
    weight_bytes = sum(value.nbytes for _, value in tree_flatten(head.parameters()))
    return HeadDrafter(head, model.vocab_size, weight_bytes, doubt)
