"""Who drafts in the target's process, and what all that can draft in a cluster are called."""

from __future__ import annotations

from pathlib import Path

from outrider.orchestrator.pair.model_files import read_json
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.heads import DRAFT_MODEL, JOINT, NGRAM, OF_TARGET, head_kind, names_of


def kind_of(head: str | Path, target: str | Path) -> str | None:
    """What kind of head lies in a folder, for the target in another; None: none that is known here."""
    return head_kind(*(read_json(Path(folder) / "config.json") for folder in (head, target)))


def own_drafters(settings: ServeSettings) -> tuple[tuple[str, str], ...]:
    """Kind and folder of each drafter of the target's process; `settings` must name folders (see `pairing`)."""
    found: list[tuple[str, str]] = []
    if settings.colocate:
        kind = settings.draft_backend if settings.drafts_by_head else DRAFT_MODEL
        found.append((kind, str(settings.draft_model)))
    for head in settings.head:
        if head in OF_TARGET:
            found.append((head, str(settings.model)))
        else:
            found.append((kind_of(head, settings.model or "") or "head", head))
    return tuple(found)


def drafters(settings: ServeSettings) -> tuple[str, ...]:
    """By which names a request may choose who drafts for it."""
    own = names_of(kind for kind, _ in own_drafters(settings))
    worker = (DRAFT_MODEL,) if settings.has_draft_worker else ()
    copies = (NGRAM,) if settings.ngrams else ()
    joint = tuple(f"{DRAFT_MODEL}{JOINT}{name}" for name in own) if worker else ()
    return (*worker, *own, *copies, *joint)
