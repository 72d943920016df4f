"""Runs the training of a pair: text, tokenizer, target, teacher's predictions, draft, held-out loss, export.

Every stage keeps its result in the workspace, so the same command continues after an interruption.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.training import corpus, export, tokenizer, windows
from models.training.corpus import Corpus
from models.training.llama import Llama
from models.training.loop import Draws, Loop, autocast, pick_device
from models.training.progress import Progress
from models.training.recipe import Recipe
from models.training.record import ModelRecord, Record
from models.training.storage import Workspace, check_out, replacing, workspace
from models.training.teacher import TeacherCache, kl_to_teacher
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_HELD_OUT_TOKENS = 65_536  # enough for a standard error near 0.01 nats


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of every stage."""

    recipe: Recipe
    space: Workspace
    device: torch.device
    tokens: NDArray[np.uint16]  # of the training text
    held_out: NDArray[np.uint16]


def run(recipe: Recipe, out: Path, extra: Sequence[Path] = ()) -> None:
    """Trains a pair, and writes `out/target`, `out/draft` and `out/training.json`. Raises InvalidRequest on bad
    input."""
    check_out(out)
    text = corpus.gather(
        corpus.standard_library(),
        extra,
        seed=recipe.seed,
        held_out=recipe.held_out_files,
        max_characters=recipe.max_characters,
    )
    log.info("text: %d files, %.1f million characters", len(text.train), text.characters / 1e6)
    identity: dict[str, object] = {"recipe": asdict(recipe), "text": text.digest()}
    with workspace(out, identity) as space:
        bpe = _tokenizer(space, text, recipe.target.vocab)
        inputs = Inputs(
            recipe,
            space,
            pick_device(),
            tokenizer.encode(bpe, text.train),
            tokenizer.encode(bpe, text.held_out),
        )
        log.info("text: %.2f million tokens; training on %s", len(inputs.tokens) / 1e6, inputs.device)
        _make_pair(inputs, bpe, text)
        space.publish()


def _tokenizer(space: Workspace, text: Corpus, vocab: int) -> Tokenizer:
    path = space.partial / "tokenizer.json"
    if not path.exists():
        log.info("tokenizer: training with a vocabulary of %d tokens", vocab)
        trained = tokenizer.train((source.text for source in text.train), vocab)
        if trained.get_vocab_size() != vocab:
            raise InvalidRequest(
                f"the text is enough for {trained.get_vocab_size()} of {vocab} tokens of the vocabulary; add text"
            )
        with replacing(path) as temporary:
            trained.save(str(temporary), pretty=False)
    return Tokenizer.from_file(str(path))


def _make_pair(inputs: Inputs, bpe: Tokenizer, text: Corpus) -> None:
    target = Llama(inputs.recipe.target, inputs.recipe.seed).to(inputs.device)
    target_seen = _train_target(inputs, target)
    draft = Llama(inputs.recipe.draft, inputs.recipe.seed + 1).to(inputs.device)
    draft_seen = _train_draft(inputs, draft, target)
    record = Record(
        recipe=inputs.recipe,
        python=platform.python_version(),
        torch=torch.__version__,
        files=len(text.train),
        characters=text.characters,
        tokens=len(inputs.tokens),
        target=ModelRecord(target_seen, held_out_loss(target, inputs.held_out, inputs.device)),
        draft=ModelRecord(draft_seen, held_out_loss(draft, inputs.held_out, inputs.device)),
        held_out=tuple(source.name for source in text.held_out),
    )
    log.info(
        "held-out loss: target %.3f, draft %.3f nats per token", record.target.held_out_loss, record.draft.held_out_loss
    )
    inputs.space.clear_result()
    export.write_model(inputs.space.result / "target", target, bpe)
    export.write_model(inputs.space.result / "draft", draft, bpe)
    record.write(inputs.space.result)


def _train_target(inputs: Inputs, model: Llama) -> int:
    """Trains the target on next tokens. Returns the tokens seen."""

    def loss_of(draws: Draws) -> Tensor:
        seed = inputs.recipe.seed + draws.phase
        batch = windows.training_batch(inputs.tokens, draws.length, seed, draws.first, draws.size)
        return _next_token_loss(model, torch.from_numpy(batch).to(inputs.device), inputs.device)

    loop = Loop("target", model, inputs.recipe.target_phases, inputs.recipe.batch_tokens)
    loop.run(loss_of, inputs.space.partial / "target.pt")
    return loop.tokens_seen()


def _train_draft(inputs: Inputs, model: Llama, teacher: Llama) -> int:
    """Distils the draft from the teacher's stored predictions. Returns the tokens seen."""
    length = inputs.recipe.draft.context
    loop = Loop("draft", model, inputs.recipe.draft_phases, inputs.recipe.batch_tokens)
    cache = TeacherCache(
        inputs.space.partial / "teacher",
        inputs.tokens,
        count=min(windows.window_count(inputs.tokens, length, spare=0), loop.tokens_seen() // length),
        length=length,
        top=inputs.recipe.teacher_top,
    )
    cache.fill(teacher, inputs.device)

    def loss_of(draws: Draws) -> Tensor:
        batch = cache.batch(windows.draw(cache.count, inputs.recipe.seed, draws.first, draws.size), inputs.device)
        with autocast(inputs.device):
            logits = model(batch.tokens)
        return kl_to_teacher(logits, batch.ids, batch.log_probs)

    loop.run(loss_of, inputs.space.partial / "draft.pt")
    return loop.tokens_seen()


@torch.no_grad()
def held_out_loss(model: Llama, tokens: NDArray[np.uint16], device: torch.device) -> float:
    """Returns the mean nats per token over windows of the full context, each read from its start."""
    length = model.shape.context
    count = min(windows.window_count(tokens, length, spare=1), max(1, _HELD_OUT_TOKENS // length))
    progress = Progress("held-out loss", count, "windows")
    model.eval()
    total = 0.0
    for index in range(count):
        window = windows.gather(tokens, np.array([index * length]), length + 1)
        total += _next_token_loss(model, torch.from_numpy(window).to(device), device).item()
        progress.update(index + 1)
    return total / count


def _next_token_loss(model: Llama, batch: Tensor, device: torch.device) -> Tensor:
    with autocast(device):
        logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
