"""Runs the training of a draft: reads the target, lets it write text, trains, and exports.

Every stage keeps its result in the work folder and the store, so the same command continues after an interruption.
Several runs may share a store: one writes, and all train on its text.
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.training.draft import export, text
from models.training.draft.learner import Draft
from models.training.draft.prompts import Prompts
from models.training.draft.store import Answer, Store, StoreForm
from models.training.draft.text import Chat
from models.training.draft.trainer import Trainer, TrainerForm
from models.training.heads.target import read_target
from models.training.llama import Llama
from models.training.loop import matrix_dtype, pick_device
from models.training.storage import check_out, replacing
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_LEAST_TOKENS = 10_000  # of text, before training begins
_SLOTS = {"cpu": 128, "cuda": 768}
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
_LENS_ANSWERS = 64  # for the initial lens
_WRITING = 0.4  # largest share of the minutes for text


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """A draft from the target's `layers` that can draft `vocab` tokens, with MLPs of width `mlp` (None: the target's).

    `text_tokens`: how much the target writes; `minutes`: for text and training (None: until it is stopped); `held_out`:
    number of prompts. `begin_as`: another run's folder, or a finished draft's, which provides the initial first layers
    and tokens that can be drafted in any case.
    """

    seed: int = 0
    layers: tuple[int, ...] = (0, 1)
    vocab: int = 12288
    mlp: int | None = None
    text_tokens: int = 3_000_000
    minutes: float | None = None
    rate: float = 5e-4
    batch_tokens: int | None = None
    coupled: float = 1.0
    held_out: int = 48
    begin_as: Path | None = None


def run(recipe: DraftRecipe, target: Path, out: Path, store: Path, *, text_only: bool = False) -> None:
    """Trains a draft from text in `store`, and writes it to `out`. Raises InvalidRequest or ModelError on bad input."""
    check_out(out)
    device = pick_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = read_target(target, device, matrix_dtype(device))
    layers = _layers(recipe, model)
    chat, cut = Chat(target), text.pieces(store)
    form = text.form(model_digest(target), cut, recipe.seed)
    work = out.with_name(out.name + ".partial")
    held_out = _held_out(store, form, model, chat, Prompts(cut, seed=recipe.seed, held_out=True), recipe)
    kept = Store(store / "answers", form)
    spent = _Spent(work / "text.json")
    with _alone(store / "writing") as writes:
        if writes:
            _write(kept, model, chat, Prompts(cut, seed=recipe.seed), recipe, spent)
    if text_only:
        return
    while kept.token_count < _LEAST_TOKENS:  # another run writes it
        log.info("draft: waits for text, %d of %d tokens", kept.token_count, _LEAST_TOKENS)
        time.sleep(20)
        kept.refresh()
    counts = sum(
        of / of.sum() for of in (chat.counts(texts, model.shape.vocab) for texts in (cut.paragraphs, cut.functions))
    )
    trainer = _trainer(recipe, model, layers, kept, held_out, counts, work)
    left = None if recipe.minutes is None else max(0.0, recipe.minutes - spent.seconds / 60)
    trainer.run(left, grow=lambda: _grow(kept, trainer.progress.step))
    trainer.sharpen()
    publish(out, target)


def publish(out: Path, target: Path) -> None:
    """Writes the best draft of the run for `out`, which may continue meanwhile."""
    check_out(out)
    work = out.with_name(out.name + ".partial")
    path = work / "best.pt"
    if not path.exists():
        raise InvalidRequest(f"{work} has no draft that has been judged yet; let the training run first")
    best = torch.load(path, map_location="cpu", weights_only=True)
    shape = read_target(target, torch.device("cpu"), torch.float32).shape
    about = {key: best[key] for key in ("score", "form", "progress", "sharpness") if key in best} | json.loads(
        (work / "draft.json").read_text()
    )
    export.write(out, best["mean"], best["outputs"], shape, about)
    log.info("draft: agreement %s", json.dumps(best["score"]))


def _layers(recipe: DraftRecipe, model: Llama) -> tuple[int, ...]:
    count = model.shape.layers
    if not recipe.layers or not all(-count <= layer < count for layer in recipe.layers):
        raise InvalidRequest(f"layers is {recipe.layers}; expected layers of the target, -{count} to {count - 1}")
    return tuple(layer % count for layer in recipe.layers)


def _trainer(
    recipe: DraftRecipe,
    model: Llama,
    layers: Sequence[int],
    kept: Store,
    held_out: Sequence[Answer],
    text_counts: Tensor,
    work: Path,
) -> Trainer:
    work.mkdir(parents=True, exist_ok=True)
    identity = json.dumps({"layers": layers, "vocab": recipe.vocab, "mlp": recipe.mlp, **asdict(kept.form)})
    note = work / "draft.json"
    begun = None if recipe.begin_as is None else _begun(recipe.begin_as)
    if not note.exists():
        likely = kept.likely(min(recipe.vocab, len(text_counts)), text_counts, None if begun is None else begun[1])
        torch.save(likely, work / "outputs.pt")
        with replacing(note) as temporary:
            temporary.write_text(identity)
    elif note.read_text() != identity:
        raise InvalidRequest(f"{work} has an unfinished draft with other settings; remove it or choose another --out")
    outputs: Tensor = torch.load(work / "outputs.pt", weights_only=True)
    device = model.embed_tokens.weight.device
    draft = Draft(model, layers, outputs, recipe.mlp).to(device)
    lens = work / "lens.pt"
    if not lens.exists():
        draft.begin(model, kept.answers[:_LENS_ANSWERS])
        with replacing(lens) as temporary:
            torch.save(draft.lens.data, temporary)
    draft.lens.data = torch.load(lens, map_location=device, weights_only=True)
    if begun is not None:
        draft.begin_as(begun[0])
    form = TrainerForm(
        rate=recipe.rate, batch_tokens=recipe.batch_tokens or _BATCH_TOKENS[device.type], coupled=recipe.coupled,
        length=min(text.LENGTH, model.shape.context), seed=recipe.seed,
    )  # fmt: skip
    return Trainer(draft, kept, held_out, work, form)


def _begun(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the parameters and the tokens of a run's best draft, or of a finished one."""
    path = folder / "best.pt"
    if not path.exists():
        return export.read(folder)
    best = torch.load(path, weights_only=True)
    return best["mean"], best["outputs"]


def _grow(kept: Store, step: int) -> None:
    if step % 16 == 0:
        kept.refresh()


def _held_out(
    folder: Path, form: StoreForm, model: Llama, chat: Chat, prompts: Prompts, recipe: DraftRecipe
) -> list[Answer]:
    """Returns answers to prompts that are not used for training."""
    kept = Store(folder / "held-out", form)
    with _alone(folder / "writing-held-out", wait=True):
        kept.refresh()
        if kept.following < recipe.held_out:
            log.info("text: %d held-out prompts", recipe.held_out)
            _answer(kept, model, chat, prompts, lambda number: number >= recipe.held_out)
    return kept.answers


class _Spent:
    """The seconds of writing text, over all runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._before = float(json.loads(path.read_text())) if path.exists() else 0.0
        self._started = time.monotonic()
        self.seconds = self._before

    def update(self) -> float:
        self.seconds = self._before + time.monotonic() - self._started
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(self.seconds))
        return self.seconds


def _write(kept: Store, model: Llama, chat: Chat, prompts: Prompts, recipe: DraftRecipe, spent: _Spent) -> None:
    most = None if recipe.minutes is None else 60 * _WRITING * recipe.minutes

    def enough(_: int) -> bool:
        return kept.token_count >= recipe.text_tokens or (most is not None and spent.update() >= most)

    if not enough(0):
        _answer(kept, model, chat, prompts, enough)


def _answer(kept: Store, model: Llama, chat: Chat, prompts: Prompts, enough: text.Enough) -> None:
    slots = _SLOTS[model.embed_tokens.weight.device.type]
    text.write(kept, model, chat, prompts, slots=slots, shard=slots // 2, enough=enough)


@contextmanager
def _alone(path: Path, wait: bool = False) -> Iterator[bool]:
    """Locks `path`, and yields whether that succeeded; with `wait` it always does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
