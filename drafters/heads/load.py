"""From a checkpoint to a drafter beside its target. A new kind of head is its forward, its files and a line here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.heads import dflash, eagle3, early_exit, mtp, redrafter
from outrider.drafters.heads.checkpoint import stranger
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.pairing import agreement, host_of
from outrider.drafters.heads.proposers import proposer_of
from outrider.engine.hidden_states import backbone_of, embedding
from outrider.engine.loading import LoadedModel, find
from outrider.protocol.digest import digest
from outrider.protocol.errors import CannotDraft, OutriderError, named_errors
from outrider.protocol.heads import OF_TARGET

log = logging.getLogger(__name__)


def _eagle3(folder: Path, target: LoadedModel) -> Head:
    table = embedding(backbone_of(target.model)[0])
    return eagle3.read(folder, target.config, target.vocab_size, lambda tokens: table(tokens))


_READ: dict[str, Callable[[Path, LoadedModel], Head]] = {
    "dflash": dflash.read,
    "eagle3": _eagle3,
    "mtp": mtp.read,
    "redrafter": redrafter.read,
}


def read(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None]) -> Head:
    """The head of this kind at a path or Hugging Face id, for `model`.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    with _named(f"loading the head {path}"):
        folder = find(path, progress)
        progress(f"loading {path}")
        return _READ[kind](folder, model)


def load(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None], alone: bool = True) -> HeadDrafter:
    """The same as a drafter beside the target; its `note` tells where head and target look wrong together.

    `alone`: the model is whole in this process. With one that several ranks share a head is not tried, for forwards
    are all ranks' affair, and one that needs the target's output layer finds a part of it only.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    if kind in ("dflash", *OF_TARGET) and not alone:
        raise CannotDraft(f"{kind} needs the target's whole output layer; use it without shards, or use eagle3")
    if kind == "early-exit":
        with _named(f"loading the head {path}"):
            return early_exit.load(find(path, progress), model)
    head, doubt, agrees, numpy = read(kind, path, model, progress), "", None, None
    if alone:
        numpy = host_of(head, model)
        progress("testing the head with the target")
        with _named(f"trying the head {path}"):
            found = agreement(head, model)
            doubts = filter(None, (stranger(find(path, progress), model.folder), found.doubt))
            doubt, agrees = "; ".join(doubts), found.own
    if doubt:
        log.warning("%s", doubt)
    return HeadDrafter(head, model.vocab_size, doubt, proposer_of(head, numpy), agrees)


def features_of(head: Head, folder: Path, target: Path) -> str:
    """Of what its features are made: the head, the target, and where that is tapped. Two that differ don't fit."""
    points = head.points
    taps = [*points.layers, *["before"] * points.before_norm, *["after"] * points.after_norm]
    return f"head {digest(folder)} at {','.join(map(str, taps))} of {digest(target)}"


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever goes wrong is a reason why the head can't draft."""
    try:
        with named_errors(what):
            yield
    except CannotDraft:
        raise
    except OutriderError as error:
        raise CannotDraft(str(error)) from error
