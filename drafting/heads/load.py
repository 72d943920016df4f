"""From a checkpoint to a drafter beside its target. A new kind of head is its forward, its files and a line here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from outrider.drafting.heads import dflash_files, eagle3_files, early_exit_files, mtp_files, redrafter_files
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.head import Head
from outrider.drafting.heads.pairing import agreement
from outrider.engine.loading import LoadedModel, find
from outrider.engine.parts import backbone_of, embedding
from outrider.protocol.errors import CannotDraft, OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.heads import OF_TARGET

log = logging.getLogger(__name__)


def _eagle3(folder: Path, target: LoadedModel) -> Head:
    table = embedding(backbone_of(target.model)[0])
    return eagle3_files.read(folder, target.config, target.vocab_size, lambda tokens: table(tokens))


_READ: dict[str, Callable[[Path, LoadedModel], Head]] = {
    "dflash": dflash_files.read,
    "eagle3": _eagle3,
    "mtp": mtp_files.read,
    "redrafter": redrafter_files.read,
}


def load(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None], alone: bool = True) -> HeadDrafter:
    """The head of this kind at a path or Hugging Face id, for `model`; its `note` tells where that looks wrong.

    `alone`: the model is whole in this process. With one that several ranks share a head is not tried, for forwards
    are all ranks' affair, and one that needs the target's output layer finds a part of it only.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    try:
        folder = find(path, progress)
        progress(f"loading {path}")
        with named_errors(f"loading the head {path}"):
            if kind in ("dflash", *OF_TARGET) and not alone:
                raise CannotDraft(f"{kind} needs all of the target's output layer; expected no shards, or eagle3")
            if kind == "early-exit":
                return early_exit_files.load(folder, model)
            head = _READ[kind](folder, model)
            doubt = ""
            if alone:
                progress("trying how head and target go together")
                doubt = agreement(head, model).doubt
    except CannotDraft:
        raise
    except OutriderError as error:
        raise CannotDraft(str(error)) from error
    if doubt:
        log.warning("%s", doubt)
    return HeadDrafter(head, model.vocab_size, doubt)
