"""Runs the training of a draft: the target's text, training, export.

Every stage keeps its result in the folder of the unfinished run and in the store, so the same command continues after
an interruption. Several runs may share a store: one generates text, and all train on it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.training.draft import text
from models.training.draft.export import read_draft, write_draft
from models.training.draft.model import DraftModel
from models.training.draft.prompts import Prompts
from models.training.draft.store import Sample, Store, StoreIdentity
from models.training.draft.text import ChatTokenizer, load_snippets
from models.training.draft.trainer import Trainer, TrainerConfig
from models.training.llama import Llama
from models.training.loop import clock_of, matrix_dtype, pick_device
from models.training.quantise import GROUP_SIZE
from models.training.recipe import Shape
from models.training.storage import Workspace, check_out, file_lock, partial_folder, replacing
from models.training.target import load_shape, load_target
from outrider.protocol.digest import model_digest, replace_file
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_MIN_TOKENS = 10_000  # of text, before training starts
_SLOTS = {"cpu": 128, "cuda": 768}
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
_LENS_SAMPLES = 64  # from which the initial lens is fitted
_TEXT_SHARE = 0.4  # largest share of the minutes for text
_REFRESH_STEPS = 16  # between two searches for new text
_WAIT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """A draft from the target's `layers` with a vocabulary of `vocab` tokens and MLPs of width `mlp` (None: the
    target's).

    `text_tokens`: how much the target generates; `minutes`: for text and training (None: until it is stopped);
    `held_out`: number of held-out prompts. `begin_as`: the folder of another run or of a finished draft, from which
    this draft takes its first layers, and tokens that are in its vocabulary in any case.
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
    """Trains a draft on text in `store`, and writes it to `out`. With `text_only` only text is generated.

    Raises:
        InvalidRequest: a setting or a folder can't be used.
        ModelError: the target can't be used.
    """
    check_out(out)
    device = pick_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    layers = _check(recipe, load_shape(target))
    partial = partial_folder(out)
    timer = _TextTimer(None if text_only else partial / "text.json", clock_of(device))
    model = load_target(target, device, matrix_dtype(device))
    tokenizer, snippets = ChatTokenizer(target), load_snippets(store)
    identity = StoreIdentity(model_digest(target), snippets.digest(), recipe.seed, text.TOP)
    held_out_prompts = Prompts(snippets, seed=recipe.seed, held_out=True)
    held_out = _held_out(store, identity, model, tokenizer, held_out_prompts, recipe.held_out)
    samples, prompts = Store(store / "answers", identity), Prompts(snippets, seed=recipe.seed)
    limit_s = math.inf if recipe.minutes is None else 60 * recipe.minutes * (1 if text_only else _TEXT_SHARE)
    while True:
        with file_lock(store / "writing") as locked:
            samples.refresh()
            if locked:
                _generate_text(samples, model, tokenizer, prompts, recipe, timer, limit_s)
            elif text_only:
                raise InvalidRequest(f"another run generates text in {store}; wait for its end or choose another")
        if text_only:
            return
        if samples.token_count >= _min_tokens(recipe):
            break
        log.info("draft: waiting for text, %d of %d tokens", samples.token_count, _min_tokens(recipe))
        time.sleep(_WAIT_SECONDS)
    training = snippets.split(held_out=False)
    counts = [tokenizer.token_counts(part, model.shape.vocab) for part in (training.paragraphs, training.functions)]
    frequencies = sum(count / count.sum() for count in counts)
    with file_lock(partial / "lock") as locked:
        if not locked:
            raise InvalidRequest(f"another run uses {partial}; wait for its end or choose another --out")
        trainer = _trainer(recipe, model, layers, samples, held_out, frequencies, partial)
        left = None if recipe.minutes is None else max(0.0, recipe.minutes - timer.seconds / 60)
        if left == 0 and trainer.state.step == 0:
            log.warning("draft: the text took all of the %g minutes, so nothing is trained", recipe.minutes)
        trainer.run(left, before_step=lambda: _refresh(samples, trainer.state.step))
        trainer.scale_logits()
        export(out, target)


def export(out: Path, target: Path) -> None:
    """Writes the best draft so far of the run for `out`, which may continue meanwhile."""
    check_out(out)
    space = Workspace(out, partial_folder(out))
    path = space.partial / "best.pt"
    if not path.exists():
        raise InvalidRequest(f"{space.partial} has no draft that has been evaluated yet; let the training run first")
    best = torch.load(path, map_location="cpu", weights_only=True)
    about = {key: best[key] for key in ("score", "form", "progress", "sharpness") if key in best} | json.loads(
        (space.partial / "draft.json").read_text()
    )
    with file_lock(space.partial / "exporting", wait=True):
        space.clear_result()
        write_draft(space.result, best["mean"], best["outputs"], load_shape(target), about)
        check_out(out)
        os.rename(space.result, out)
    log.info("draft: agreement %s", json.dumps(best["score"]))


def _check(recipe: DraftRecipe, target: Shape) -> tuple[int, ...]:
    """Returns the numbers of the layers. Raises InvalidRequest if the recipe is invalid for this target."""
    count = target.layers
    if not recipe.layers or not all(-count <= layer < count for layer in recipe.layers):
        raise InvalidRequest(f"layers is {recipe.layers}; expected layers of the target, -{count} to {count - 1}")
    for name, value, low, high in (
        ("seed", recipe.seed, 0, 2**32 - 1), ("vocabulary", recipe.vocab, 1, 2**24),
        ("width of the MLPs", recipe.mlp, GROUP_SIZE, target.mlp), ("learning rate", recipe.rate, 0, 1),
        ("number of text tokens", recipe.text_tokens, 1, 10**12), ("number of minutes", recipe.minutes, 0, 10**6),
        ("number of tokens per batch", recipe.batch_tokens, 1, 2**24), ("weight of --coupled", recipe.coupled, 0, 1000),
    ):  # fmt: skip
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"the {name} must lie between {low:,} and {high:,}, not {value}")
    if any(width % GROUP_SIZE for width in (target.hidden, target.heads * target.head_dim, recipe.mlp or target.mlp)):
        raise InvalidRequest(f"a draft is stored in groups of {GROUP_SIZE} weights; expected widths that they divide")
    return tuple(layer % count for layer in recipe.layers)


def _trainer(
    recipe: DraftRecipe,
    model: Llama,
    layers: Sequence[int],
    samples: Store,
    held_out: Sequence[Sample],
    frequencies: Tensor,
    partial: Path,
) -> Trainer:
    """Returns the trainer of a new or unfinished run. Vocabulary and initial lens are chosen once."""
    initial = None if recipe.begin_as is None else _read_initial(recipe.begin_as, len(layers), recipe.mlp, model.shape)
    vocab_ids = _vocabulary(recipe, layers, samples, frequencies, None if initial is None else initial[1], partial)
    device = model.embed_tokens.weight.device
    draft = DraftModel(model, layers, vocab_ids, recipe.mlp).to(device)
    lens = partial / "lens.pt"
    if not lens.exists():
        draft.fit_lens(model, samples.samples[:_LENS_SAMPLES])
        with replacing(lens) as temporary:
            torch.save(draft.lens.data, temporary)
    draft.lens.data = torch.load(lens, map_location=device, weights_only=True)
    if initial is not None:
        draft.init_from_draft(initial[0])
    config = TrainerConfig(
        rate=recipe.rate, batch_tokens=recipe.batch_tokens or _BATCH_TOKENS[device.type], coupled=recipe.coupled,
        length=min(text.MAX_TOKENS, model.shape.context), seed=recipe.seed,
    )  # fmt: skip
    return Trainer(draft, samples, held_out, partial, config)


def _vocabulary(
    recipe: DraftRecipe,
    layers: Sequence[int],
    samples: Store,
    frequencies: Tensor,
    included: Tensor | None,
    partial: Path,
) -> Tensor:
    """Returns the vocabulary of the run. Raises InvalidRequest if the unfinished run has other settings."""
    content = {"layers": layers, "vocab": recipe.vocab, "mlp": recipe.mlp, **asdict(samples.identity)}
    path, identity = partial / "draft.json", json.dumps(content)
    if not path.exists():
        partial.mkdir(parents=True, exist_ok=True)
        count = min(recipe.vocab, len(frequencies))
        torch.save(samples.likely_tokens(count, frequencies, included), partial / "outputs.pt")
        replace_file(path, identity)
    elif path.read_text() != identity:
        raise InvalidRequest(
            f"{partial} has an unfinished draft with other settings; remove it or choose another --out"
        )
    vocab_ids: Tensor = torch.load(partial / "outputs.pt", weights_only=True)
    return vocab_ids


def _read_initial(folder: Path, layers: int, mlp: int | None, target: Shape) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the parameters and the vocabulary of a run's best draft, or of a finished one. Raises InvalidRequest if a
    draft of so many `layers` can't begin with them."""
    path = folder / "best.pt"
    if path.exists():
        best = torch.load(path, map_location="cpu", weights_only=True)
        weights, vocab_ids = best["mean"], best["outputs"]
    else:
        weights, vocab_ids = read_draft(folder)
    count = sum(name.endswith(".gate_proj.weight") for name in weights)
    gate = weights.get("layers.0.mlp.gate_proj.weight", torch.empty(0, 0))
    form = (*gate.shape, int(vocab_ids.max()) < target.vocab)
    if count > layers or form != (mlp or target.mlp, target.hidden, True):
        raise InvalidRequest(
            f"{folder} has {count} layers of width {form[1]} with MLPs of {form[0]}; expected up to {layers} of"
            f" {target.hidden} with MLPs of {mlp or target.mlp}, and a vocabulary of the same target"
        )
    return weights, vocab_ids


def _refresh(samples: Store, step: int) -> None:
    if step % _REFRESH_STEPS == 0:
        samples.refresh()


def _held_out(
    folder: Path, identity: StoreIdentity, model: Llama, tokenizer: ChatTokenizer, prompts: Prompts, count: int
) -> list[Sample]:
    """Returns the target's answers to the first `count` held-out prompts."""
    store = Store(folder / "held-out", identity)
    with file_lock(folder / "writing-held-out", wait=True):
        store.refresh()
        if not store.samples:  # they are one shard
            log.info("text: %d held-out prompts", count)
            _answer(store, model, tokenizer, prompts, lambda number: number >= count, in_one_shard=True)
    return store.samples


class _TextTimer:
    """Counts the seconds before the training, most of them for text, over all runs that have this `path`."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._before = float(json.loads(path.read_text())) if path is not None and path.exists() else 0.0
        self._started = clock()
        self.seconds = self._before

    def update(self) -> float:
        self.seconds = self._before + self._clock() - self._started
        if self._path is not None:
            replace_file(self._path, json.dumps(self.seconds))
        return self.seconds


def _min_tokens(recipe: DraftRecipe) -> int:
    """Returns how much text training needs."""
    return min(_MIN_TOKENS, recipe.text_tokens)


def _generate_text(
    store: Store,
    model: Llama,
    tokenizer: ChatTokenizer,
    prompts: Prompts,
    recipe: DraftRecipe,
    timer: _TextTimer,
    limit_s: float,
) -> None:
    def is_enough(_: int) -> bool:
        is_late = timer.update() >= limit_s and store.token_count >= _min_tokens(recipe)
        return is_late or store.token_count >= recipe.text_tokens

    if not is_enough(0):
        _answer(store, model, tokenizer, prompts, is_enough)
        timer.update()


def _answer(
    store: Store,
    model: Llama,
    tokenizer: ChatTokenizer,
    prompts: Prompts,
    is_enough: Callable[[int], bool],
    in_one_shard: bool = False,
) -> None:
    slots = _slot_count(model)
    shard = sys.maxsize if in_one_shard else slots // 2
    text.generate(store, model, tokenizer, prompts, slots=slots, shard=shard, is_enough=is_enough)


def _slot_count(model: Llama) -> int:
    """Returns how many answers are generated at once: on a GPU, keys and values take at most half of its memory."""
    embedding, shape = model.embed_tokens.weight, model.shape
    count = _SLOTS[embedding.device.type]
    if not embedding.is_cuda:
        return count
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * embedding.element_size()
    memory = torch.cuda.get_device_properties(embedding.device).total_memory
    return max(2, min(count, memory // 2 // (row * min(text.MAX_TOKENS, shape.context))))
