"""Finds a model's files: resolves a name, a Hugging Face id, a folder or a GGUF file to a folder, without MLX.

A copy in the Hugging Face cache is used as it is; otherwise the model is downloaded, unless offline mode is on. A GGUF
file is converted once. Names are those of `pulled`, and `tiny`, the pair for tests. Reads config.json; knows nothing of
weights and tokens.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.orchestrator.pairing.pulled import MODELS_FOLDER, PULLED_MODELS, pull
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.digest import cache_folder, content_hash, make_cached, read_json, read_weight_map
from outrider.protocol.errors import ModelError, first_line
from outrider.protocol.heads import (
    DRAFT_MODEL,
    JOINT_SEPARATOR,
    NGRAM,
    TARGET_HEADS,
    context_length,
    head_kind,
    head_tensor_prefixes,
    text_config,
    unique_names,
)

PACKAGE_FOLDER = Path(__file__).absolute().parents[2]
"""The package `outrider`; in a checkout its subpackages are links to folders."""
TINY_TARGET, TINY_DRAFT, TINY_HEADS = (MODELS_FOLDER / part for part in ("target", "draft", "heads"))
"""The tiny pair, and a folder with a folder for each kind of head that comes with its target."""

TINY = "tiny"
"""The name of the tiny pair, which is part of a checkout, not of the installed package."""
DEFAULT_MODEL = "smollm2"
"""The default model."""
MODEL_VARIABLE = "OUTRIDER_MODEL"
"""The environment variable that sets another default model."""
_REPOSITORY_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt", "*.py")
_WEIGHT_PATTERNS = ("model*.safetensors",)
_EXPECTED_NAME = (
    f"expected a name ({' or '.join(PULLED_MODELS)}, see `outrider pairs`), a Hugging Face id such as org/name, a"
    " folder or a GGUF file"
)
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_LFS_POINTER = b"version https://git-lfs"  # the beginning of what Git stores in place of a large file
_CONVERSION_VERSION = 7
"""The version of the conversion; increased when the same GGUF file is converted differently."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's `name` as the user gave it, and its `folder`. `vocab_size`: None if config.json does not have it."""

    name: str
    folder: Path
    model_type: str
    vocab_size: int | None
    context_length: int


def find_model(name: str, weights: bool = True, keep_precision: bool = False) -> ModelFiles:
    """Finds the files of a named model, a Hugging Face id, a local folder or a GGUF file.

    `weights` False: config and tokenizer only. `keep_precision`: types of a GGUF file that MLX can't hold stay in half
    precision.

    Raises:
        ModelError: no such folder, no such repository, or no model in it; the message says which and what to do.
    """
    if not name.strip():
        raise ModelError(f"the model's name is empty; {_EXPECTED_NAME}")
    if name == TINY:
        return _describe_model(name, Path(tiny_pair()[0]), weights)
    if name in PULLED_MODELS:
        model = PULLED_MODELS[name]
        return _describe_model(name, _convert_gguf(partial(pull, model), keep_precision, model.sha256), weights)
    path = _find_path(name)
    if path is not None and is_gguf(path):
        return _describe_model(name, _convert_gguf(lambda: path, keep_precision, content_hash(path)), weights)
    return _describe_model(name, path or _fetch_from_hub(name, weights), weights)


def _find_path(name: str) -> Path | None:
    """Returns the path of this name; None if there is none.

    Raises:
        ModelError: it can't be looked up: this folder or another may not be entered, there is no such user's home, ...
    """
    try:
        path = Path(name).expanduser()
        if exists := (path / "config.json").exists() or path.exists():
            f"{name} {path.resolve()}".encode()  # messages have the name, and libraries open only paths in UTF-8
        return path if exists else None
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"{name[:200]} can't be opened ({why}); {_EXPECTED_NAME}") from None


def default_model(keep_precision: bool = False) -> tuple[str, str | None]:
    """Returns the default model's name, and a note if it is the tiny one because the default can't be downloaded.

    Raises:
        ModelError: the default can't be downloaded, and this installation has no tiny pair.
    """
    if named := os.environ.get(MODEL_VARIABLE):
        return named, None
    try:
        return find_model(DEFAULT_MODEL, weights=False, keep_precision=keep_precision).name, None
    except ModelError as error:
        if not has_tiny_pair():
            raise
        return TINY, f"{error}; using the tiny test model (--model tiny) instead, whose answers make little sense"


def has_tiny_pair() -> bool:
    """Returns whether this installation has the tiny pair."""
    return (TINY_TARGET / "config.json").is_file()


def is_gguf(path: Path) -> bool:
    """Returns whether this file has GGUF's suffix or its magic number: Ollama's files have no suffix."""
    return (path.suffix.lower() == ".gguf" and path.is_file()) or _begins_with(path, b"GGUF")


def _begins_with(path: Path, begin: bytes) -> bool:
    """Returns whether these are a file's first bytes; False if it can't be read, or is a pipe, which would wait."""
    with suppress(OSError):
        if os.path.isfile(path):
            with path.open("rb") as file:
                return file.read(len(begin)) == begin
    return False


def find_own_head(name: str) -> ModelFiles:
    """Finds the files of a model's own head: from a repository, only the shards with the head's weights, if any.

    Raises:
        ModelError: as `find_model`.
    """
    if name == TINY or name in PULLED_MODELS or _find_path(name) is not None:
        return find_model(name)
    described = find_model(name, weights=False)
    places = read_weight_map(described.folder)
    names = head_tensor_prefixes(read_json(described.folder / "config.json"))
    shards = sorted({str(file) for key, file in places.items() if key.startswith(names)})
    if places and not shards:
        return described  # the loader reports that there is no head; the model runs without one
    return _describe_model(name, _fetch_from_hub(name, True, shards), weights=True)


def tiny_pair() -> tuple[str, str]:
    """Returns the folders of the tiny pair, target first.

    Raises:
        ModelError: this installation has no tiny pair.
    """
    if not has_tiny_pair():
        raise ModelError("the tiny pair for tests comes with a clone of the repository only; name another --model")
    return str(TINY_TARGET), str(TINY_DRAFT)


def tiny_heads() -> dict[str, str]:
    """Returns the folders of the heads that come with the tiny target, by kind."""
    return {file.parent.name: str(file.parent) for file in sorted(TINY_HEADS.glob("*/config.json"))}


def _convert_gguf(find: Callable[[], Path], keep_precision: bool, sha256: str) -> Path:
    form = f"{'half' if keep_precision else 'mlx'}{_CONVERSION_VERSION}"
    sampling = next((model.sampling for model in PULLED_MODELS.values() if model.sha256 == sha256), None)

    def convert(folder: Path) -> None:
        from outrider.orchestrator.pairing.gguf import read_gguf  # deferred: most models don't need it
        from outrider.orchestrator.pairing.gguf_model import write_model

        write_model(read_gguf(find()), folder, keep_precision, sampling)

    return make_cached(cache_folder() / "gguf" / f"{sha256[:24]}-{form}", convert, "model.safetensors")


def _describe_model(name: str, folder: Path, weights: bool) -> ModelFiles:
    if not folder.is_dir():
        raise ModelError(f"{name} is a file that is not in GGUF format; {_EXPECTED_NAME}")
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = "merge an adapter into its model first" if is_adapter else "a GGUF file is given by its path"
        raise ModelError(f"{name} is not a model folder: config.json is missing ({hint})")
    used = (folder / "tokenizer.json", *(folder.glob("model*.safetensors") if weights else ()))
    if pointer := next((file.name for file in used if _begins_with(file, _LFS_POINTER)), ""):
        raise ModelError(f"{name} has a pointer of Git LFS in place of {pointer}; run `git lfs pull` in that folder")
    if weights and not any(folder.glob("[!.]*.safetensors")):
        raise ModelError(f"{name} has no *.safetensors files; other weights (pytorch_model.bin) have to be converted")
    config = read_json(folder / "config.json")
    vocab_size = {**config, **text_config(config)}.get("vocab_size")
    return ModelFiles(
        name=name,
        folder=folder.resolve(),
        model_type=str(config.get("model_type", "")),
        vocab_size=vocab_size if type(vocab_size) is int else None,
        context_length=context_length(config),
    )


def _fetch_from_hub(name: str, weights: bool, shards: Sequence[str] = ()) -> Path:
    """Finds or downloads a repository. `shards`: the files of its weights; empty for all."""
    shown = f"{name} (in {MODEL_VARIABLE})" if name == os.environ.get(MODEL_VARIABLE) else name
    if name.startswith((".", "/", "~")) or not _REPOSITORY_ID.fullmatch(name):
        raise ModelError(f"no such path: {shown}; {_EXPECTED_NAME}")
    from huggingface_hub import HfApi, snapshot_download  # deferred: a local model doesn't need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*_CONFIG_PATTERNS, *((shards or _WEIGHT_PATTERNS) if weights else ())]
    with suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if not weights or _has_weights(cached, shards):
            return cached
    try:
        found = Path(snapshot_download(name, allow_patterns=patterns))
        if weights and not _has_weights(found, shards):  # it is also what the cache has if the hub can't be reached
            HfApi().repo_info(name)
        return found
    except Exception as error:  # the HTTP libraries of the hub's versions share no base class
        raise ModelError(f"no model {shown}: there is no such folder, and {_hub_error_reason(error)}") from None


def _has_weights(folder: Path, shards: Sequence[str]) -> bool:
    names = set(shards) or set(map(str, read_weight_map(folder).values()))
    return all((folder / file).is_file() for file in names) if names else any(folder.glob("*.safetensors"))


def _hub_error_reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "accept its terms on Hugging Face first, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "Hugging Face has no such public repository"
    if isinstance(error, errors.HFValidationError):
        return "this is not the id of a Hugging Face repository"
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return f"the download can't be stored ({error.strerror}); free some space, or choose another folder (HF_HOME)"
    if constants.HF_HUB_OFFLINE:
        return "offline mode is on (HF_HUB_OFFLINE, --offline) and the cache has no complete copy"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "Hugging Face can't be reached and the cache has no complete copy"
    return f"Hugging Face can't be reached ({type(error).__name__}: {first_line(error)})"


def find_head_kind(head: str | Path, target: str | Path) -> str | None:
    """Returns the kind of the head in folder `head` for the model in folder `target`; None if it is unknown."""
    return head_kind(*(read_json(Path(folder) / "config.json") for folder in (head, target)))


def in_process_drafters(settings: ServeSettings) -> tuple[tuple[str, str], ...]:
    """Returns kind and folder of each drafter in the target's process; `settings` must name folders (see `pairing`)."""
    in_process: list[tuple[str, str]] = []
    if settings.colocate:
        kind = settings.draft_backend if settings.drafts_with_head else DRAFT_MODEL
        in_process.append((kind, str(settings.draft_model)))
    for head in settings.head:
        if head in TARGET_HEADS:
            in_process.append((head, str(settings.model)))
        else:
            in_process.append((find_head_kind(head, settings.model or "") or "head", head))
    return tuple(in_process)


def drafter_names(settings: ServeSettings) -> tuple[str, ...]:
    """Returns the names by which a request may choose its drafter."""
    own = unique_names(kind for kind, _ in in_process_drafters(settings))
    worker = (DRAFT_MODEL,) if settings.has_draft_worker or settings.workers_endpoint is not None else ()
    copies = (NGRAM,) if settings.ngrams else ()
    joint = tuple(f"{DRAFT_MODEL}{JOINT_SEPARATOR}{name}" for name in own) if settings.has_draft_worker else ()
    return (*worker, *own, *copies, *joint)
