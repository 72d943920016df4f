"""Runs the training of a head: reads the target, lets it write text, trains, measures held-out agreement, exports.

Every stage keeps its result, so the same command continues after an interruption.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.training import corpus, windows
from models.training.corpus import Corpus, Source
from models.training.heads import kinds, prompts
from models.training.heads.foretold import Words, agreement, loss
from models.training.heads.learner import Learner, Subject
from models.training.heads.prompts import Prompts
from models.training.heads.recipe import HeadRecipe, check
from models.training.heads.record import HeadRecord
from models.training.heads.store import Store, StoreForm
from models.training.heads.target import read_target
from models.training.llama import Llama
from models.training.loop import Draws, Loop, autocast, pick_device
from models.training.storage import Workspace, check_out, workspace
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import ModelError

log = logging.getLogger(__name__)

_HELD_OUT_WINDOWS = 32
_FIRST_WINDOWS = 64  # for a head's initialisation


@dataclass(frozen=True, slots=True)
class Run:
    """The inputs of every stage."""

    recipe: HeadRecipe
    target: Llama
    config: dict[str, Any]
    tokenizer: Tokenizer
    form: StoreForm
    text: Corpus
    device: torch.device

    def prompts(self, sources: Sequence[Source], part: int, size: int) -> Prompts:
        length, seed = self.recipe.length, self.recipe.seed
        return prompts.draw(sources, self.tokenizer, self.recipe.temps, length=length, seed=seed, part=part, size=size)


def run(recipe: HeadRecipe, target: Path, out: Path, store: Path | None = None, extra: Sequence[Path] = ()) -> None:
    """Trains a head, and writes it to `out`; keeps the target's text in `store`. Raises InvalidRequest or
    ModelError."""
    check_out(out)
    device = pick_device()
    model = read_target(target, device)
    check(recipe, model.shape)
    text = corpus.gather(corpus.standard_library(), extra, seed=recipe.seed, held_out=recipe.held_out_files)
    form = StoreForm(
        model_digest(target), text.digest(), recipe.seed, recipe.length, recipe.taps(model.shape), recipe.top,
        recipe.temps, recipe.part,
    )  # fmt: skip
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    made = Run(recipe, model, config, _tokenizer(target, model), form, text, device)
    with workspace(out, {"recipe": asdict(recipe), "store": asdict(form)}) as space:
        _make(made, space, store or space.partial / "text")
        space.publish()


def _make(made: Run, space: Workspace, folder: Path) -> None:
    kept = Store(folder, made.form)
    kept.fill(made.recipe.parts, made.target, lambda part: made.prompts(made.text.train, part, made.recipe.part))
    subject = _subject(made, kept)
    learner = kinds.build(made.recipe, subject).to(made.device)
    learner.begin(kept.lesson(np.arange(min(_FIRST_WINDOWS, kept.count)), made.device))
    loop = Loop(f"{made.recipe.kind} head", learner, made.recipe.phases, made.recipe.batch_tokens)

    def loss_of(draws: Draws) -> Tensor:
        lesson = kept.lesson(
            windows.draw(kept.count, made.recipe.seed + draws.phase, draws.first, draws.size), made.device
        )
        with autocast(made.device):
            steps = learner(lesson)
        return loss(steps, learner.output, Words.of(lesson.ids, lesson.log_probs, learner.names))

    loop.run(loss_of, space.partial / "head.pt")
    found = _held_out(made, learner, folder / "held-out")
    log.info("held-out agreement by step: %s", ", ".join(f"{share:.3f}" for share in found))
    space.clear_pair()
    write(space.pair, learner, made.form.target)
    HeadRecord(
        recipe=made.recipe,
        target=made.form.target,
        python=platform.python_version(),
        torch=torch.__version__,
        files=len(made.text.train),
        parameters=sum(parameter.numel() for parameter in learner.parameters()),
        tokens_seen=loop.tokens_seen(),
        held_out_agreement=found,
        held_out=tuple(source.name for source in made.text.held_out),
    ).write(space.pair)


def _subject(made: Run, kept: Store) -> Subject:
    """Returns the subject; its vocabulary has the tokens that the target wrote most often, in order of their ids."""
    vocab = made.target.shape.vocab
    ranked = np.argsort(-kept.token_counts(vocab), kind="stable")
    ids = torch.from_numpy(np.sort(ranked[: made.recipe.vocab or vocab])).to(made.device)
    return Subject(made.target, made.form.taps, ids, int(ranked[-1]), made.config)


@torch.no_grad()
def _held_out(made: Run, learner: Learner, folder: Path) -> tuple[float, ...]:
    """Returns the agreement by step on text that the target wrote after held-out files."""
    kept = Store(folder, replace(made.form, part=_HELD_OUT_WINDOWS))
    kept.fill(1, made.target, lambda part: made.prompts(made.text.held_out, part, _HELD_OUT_WINDOWS))
    lesson = kept.lesson(np.arange(_HELD_OUT_WINDOWS), made.device)
    learner.eval()
    with autocast(made.device):
        steps = learner(lesson)
        return agreement(steps, learner.output, Words.of(lesson.ids, lesson.log_probs, learner.names))


def _tokenizer(folder: Path, target: Llama) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; expected the target's, in the format of tokenizers")
    found = Tokenizer.from_file(str(path))
    if found.get_vocab_size() > target.shape.vocab:
        raise ModelError(f"{path} has {found.get_vocab_size()} tokens, more than the target's {target.shape.vocab}")
    return found


def write(folder: Path, learner: Learner, target: str) -> None:
    """Writes a head's new folder in its published layout, with the fingerprint of its target."""
    config, tensors = learner.published()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "target": target}, indent=1) + "\n")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
