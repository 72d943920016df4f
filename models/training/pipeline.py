"""Runs the training of a pair: text, tokenizer, target, teacher's logits, draft, held-out loss, export.

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

from models.training import corpus, distill, export, tokenizer, windows
from models.training.corpus import Corpus
from models.training.llama import Llama
from models.training.loop import Draws, Loop, autocast, pick_device
from models.training.progress import Progress
from models.training.recipe import Recipe
from models.training.record import Record, Trained
from models.training.storage import Workspace, check_out, replacing, workspace
from models.training.teacher import TeacherCache
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_HELD_OUT_TOKENS = 65_536  # enough for a standard error near 0.01 nats


@dataclass(frozen=True, slots=True)
class Run:
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
        vocabulary = _tokenizer(space, text, recipe.target.vocab)
        made = Run(
            recipe,
            space,
            pick_device(),
            tokenizer.encode(vocabulary, text.train),
            tokenizer.encode(vocabulary, text.held_out),
        )
        log.info("text: %.2f million tokens; training on %s", len(made.tokens) / 1e6, made.device)
        _make_pair(made, vocabulary, text)
        space.publish()


def _tokenizer(space: Workspace, text: Corpus, vocab: int) -> Tokenizer:
    path = space.partial / "tokenizer.json"
    if not path.exists():
        log.info("tokenizer: learning %d tokens", vocab)
        learned = tokenizer.train((source.text for source in text.train), vocab)
        if learned.get_vocab_size() != vocab:
            raise InvalidRequest(
                f"the text is enough for {learned.get_vocab_size()} of {vocab} tokens of the vocabulary; add text"
            )
        with replacing(path) as temporary:
            learned.save(str(temporary), pretty=False)
    return Tokenizer.from_file(str(path))


def _make_pair(made: Run, vocabulary: Tokenizer, text: Corpus) -> None:
    target = Llama(made.recipe.target, made.recipe.seed).to(made.device)
    target_seen = _train_target(made, target)
    draft = Llama(made.recipe.draft, made.recipe.seed + 1).to(made.device)
    draft_seen = _train_draft(made, draft, target)
    record = Record(
        recipe=made.recipe,
        python=platform.python_version(),
        torch=torch.__version__,
        files=len(text.train),
        characters=text.characters,
        tokens=len(made.tokens),
        target=Trained(target_seen, held_out_loss(target, made.held_out, made.device)),
        draft=Trained(draft_seen, held_out_loss(draft, made.held_out, made.device)),
        held_out=tuple(source.name for source in text.held_out),
    )
    log.info(
        "held-out loss: target %.3f, draft %.3f nats per token", record.target.held_out_loss, record.draft.held_out_loss
    )
    made.space.clear_pair()
    export.write_model(made.space.pair / "target", target, vocabulary)
    export.write_model(made.space.pair / "draft", draft, vocabulary)
    record.write(made.space.pair)


def _train_target(made: Run, model: Llama) -> int:
    """Trains the target on next tokens. Returns the tokens seen."""

    def loss_of(draws: Draws) -> Tensor:
        seed = made.recipe.seed + draws.phase
        rows = windows.training_rows(made.tokens, draws.length, seed, draws.first, draws.size)
        return _next_token_loss(model, torch.from_numpy(rows).to(made.device), made.device)

    loop = Loop("target", model, made.recipe.target_phases, made.recipe.batch_tokens)
    loop.run(loss_of, made.space.partial / "target.pt")
    return loop.tokens_seen()


def _train_draft(made: Run, model: Llama, teacher: Llama) -> int:
    """Distils the draft from the teacher's stored logits. Returns the tokens seen."""
    length = made.recipe.draft.context
    loop = Loop("draft", model, made.recipe.draft_phases, made.recipe.batch_tokens)
    there = windows.window_count(made.tokens, length, spare=0)
    cache = TeacherCache(
        made.space.partial / "teacher",
        made.tokens,
        count=min(there, loop.tokens_seen() // length),
        length=length,
        top=made.recipe.teacher_top,
    )
    cache.fill(teacher, made.device)

    def loss_of(draws: Draws) -> Tensor:
        rows = cache.rows(windows.draw(cache.count, made.recipe.seed, draws.first, draws.size), made.device)
        with autocast(made.device):
            logits = model(rows.tokens)
        return distill.kl_to_teacher(logits, rows.ids, rows.log_probs)

    loop.run(loss_of, made.space.partial / "draft.pt")
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
        rows = windows.rows(tokens, np.array([index * length]), length + 1)
        total += _next_token_loss(model, torch.from_numpy(rows).to(device), device).item()
        progress.update(index + 1)
    return total / count


def _next_token_loss(model: Llama, rows: Tensor, device: torch.device) -> Tensor:
    with autocast(device):
        logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
