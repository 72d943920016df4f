"""Chooses the models of a cluster: turns settings with names into settings with folders, and loads the text side.

Loading the tokenizers is a separate step, since it can run while the workers load their weights.
"""

from __future__ import annotations

import filecmp
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.orchestrator.pairing.model_files import (
    TINY,
    TINY_TARGET,
    ModelFiles,
    default_model,
    find_head_kind,
    find_model,
    find_own_head,
    tiny_heads,
    tiny_pair,
)
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, make_draft
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec, require_same_vocabulary
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.heads import HEAD_KINDS, TARGET_HEADS
from outrider.protocol.ngrams import NgramTable

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The models to run; `settings` name their folders. `notes` say what was chosen by default, or left out."""

    settings: ServeSettings
    target: ModelFiles
    draft: ModelFiles | None
    notes: tuple[str, ...] = ()


def choose_pair(settings: ServeSettings) -> ChosenPair:
    """Finds the files of both models, and downloads them if needed.

    Raises:
        ModelError: a model can't be found, or a folder holds no model.
    """
    keep = settings.gguf_keep_precision
    model, note = default_model(keep) if settings.model is None else (settings.model, None)
    notes = () if note is None else (note,)
    draft = _find_default_draft(settings, model) if settings.draft_model is None else settings.draft_model
    if draft is None and settings.needs_draft_model:
        if settings.colocate or settings.draft_backend not in ("mlx", "auto"):
            raise ModelError(f"no draft model comes with {model}; expected --draft-model")
        settings = replace(settings, draft_backend="ngram" if settings.ngrams else "none")
        if settings.ngrams and not settings.head and model not in PULLED_MODELS:
            notes = (*notes, "there is no draft model (--draft-model), so drafts come only from n-grams of the text")
    target_files, draft_files = find_model(model, not settings.await_target, keep), None
    if draft is not None and settings.needs_draft_model:
        settings = _resolve_backend(settings, draft, target_files)
        is_mtp = settings.draft_backend == "mtp"
        draft_files = find_own_head(draft) if is_mtp else find_model(draft, keep_precision=keep)
        if settings.drafts_with_head:  # a head has the target's tokens and context, whatever its config says
            draft_files = replace(draft_files, vocab_size=None, context_length=target_files.context_length)
    heads, left_out = _resolve_heads(settings.head, target_files)
    folders = replace(
        settings,
        head=heads,
        model=str(target_files.folder),
        draft_model=str(draft_files.folder) if draft_files else None,
        ngram_table=_find_ngram_table(settings, model, target_files),
    )
    return ChosenPair(folders, target_files, draft_files, (*notes, *left_out))


def load_pair(pair: ChosenPair) -> TextCodec:
    """Loads the target's tokenizer and template, and checks that the draft model has the same vocabulary.

    Raises:
        ModelError: a tokenizer can't be read, or the vocabularies differ; the message says how.
    """
    codec, draft = load_codec(pair.target, template=True), pair.draft
    if draft is not None and not pair.settings.drafts_with_head:
        equal, _, _ = filecmp.cmpfiles(pair.target.folder, draft.folder, _VOCABULARY_FILES, shallow=False)
        if len(equal) < len(_VOCABULARY_FILES):  # comparing them is quicker than loading a tokenizer
            require_same_vocabulary(codec, load_codec(draft))
    return codec


def _find_default_draft(settings: ServeSettings, model: str) -> str | None:
    """Returns the draft model or head that comes with this model; None if there is none."""
    if model == TINY and not settings.drafts_with_head:
        return tiny_pair()[1]
    if model == TINY and settings.draft_backend in (shipped := tiny_heads()):
        return shipped[settings.draft_backend]
    if settings.draft_backend in TARGET_HEADS:
        return model
    if settings.drafts_with_head:
        raise ModelError(f"no {settings.draft_backend} head comes with {model}; expected --draft-model")
    if model in PULLED_MODELS and settings.draft_backend in ("mlx", "auto"):
        draft = make_draft(PULLED_MODELS[model], find_model(model, keep_precision=settings.gguf_keep_precision).folder)
        return None if draft is None else str(draft)
    return None


def _find_ngram_table(settings: ServeSettings, model: str, target: ModelFiles) -> str | None:
    """Returns the file of n-grams that is given or comes with this model; None if there is none, or none are used.

    Raises:
        ModelError: it can't be read, or has tokens that the target lacks.
    """
    path, pulled = settings.ngram_table, PULLED_MODELS.get(model)
    if path is None and pulled is not None and pulled.ngrams is not None and pulled.ngrams.is_file():
        path = str(pulled.ngrams)
    if path is None or not settings.ngrams:
        return None
    greatest = NgramTable.load(path).max_token
    if target.vocab_size is not None and greatest >= target.vocab_size:
        raise ModelError(
            f"{path} has token {greatest}, but {target.name} has only {target.vocab_size}; expected a table made for it"
        )
    return str(Path(path).resolve())


def _resolve_heads(named: tuple[str, ...], target: ModelFiles) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the folders of these heads, and a note for each head that can't be used with this target."""
    folders, left_out = [], []
    for name in named:
        try:
            folders.append(_resolve_head(name, target))
        except OutriderError as error:
            left_out.append(f"head {name} is not used: {error}")
    return tuple(folders), tuple(left_out)


def _resolve_head(name: str, target: ModelFiles) -> str:
    """Returns a head's folder, or its kind if it is the target's own. A kind alone names the tiny target's head."""
    if target.folder == TINY_TARGET and name in (shipped := tiny_heads()):
        return shipped[name]
    if name in TARGET_HEADS:
        find_own_head(target.name)
        return name
    kind = find_head_kind(find_model(name, weights=False).folder, target.folder)
    if kind is None:
        raise ModelError(
            f"{name} is not a head for {target.name} by its config.json; expected one of {', '.join(HEAD_KINDS)}"
        )
    return str((find_own_head(name) if kind == "mtp" else find_model(name)).folder)


def _resolve_backend(settings: ServeSettings, draft: str, target: ModelFiles) -> ServeSettings:
    """Replaces backend `auto` by the draft's own. Raises ModelError if a head is given with a model's backend."""
    files = find_model(draft, weights=False, keep_precision=settings.gguf_keep_precision)
    kind = find_head_kind(files.folder, target.folder)
    if settings.draft_backend == "auto":
        return replace(settings, draft_backend=kind or "mlx")
    if kind not in (None, "mtp") and not settings.drafts_with_head:
        raise ModelError(f"{draft} is a draft head; expected --draft-backend {kind} or auto")
    return settings
