"""Runs the training of a head: the target's text, training, held-out agreement, export.

Every stage keeps its result, so the same command continues after an interruption.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from models.training import corpus, windows
from models.training.corpus import Corpus, Source
from models.training.heads.dflash import DFlash
from models.training.heads.eagle3 import Eagle3
from models.training.heads.early_exit import EarlyExit
from models.training.heads.head import Target, TrainableHead
from models.training.heads.loss import TargetTopK, agreement, loss
from models.training.heads.mtp import Mtp
from models.training.heads.recipe import HeadRecipe, check
from models.training.heads.redrafter import Redrafter
from models.training.heads.store import Prompts, Store, StoreIdentity, draw_prompts
from models.training.llama import Llama
from models.training.loop import Draws, Loop, autocast, pick_device
from models.training.record import FILE_NAME
from models.training.storage import Workspace, check_out, workspace, write_json
from models.training.target import load_target
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import ModelError

log = logging.getLogger(__name__)

_HELD_OUT_WINDOWS = 32
_INIT_WINDOWS = 64  # from which parameters are initialised

_KINDS: dict[str, Callable[[HeadRecipe, Target], TrainableHead]] = {
    "eagle3": lambda recipe, target: Eagle3(target, recipe.shape(target.model.shape), recipe.steps, recipe.seed),
    "mtp": lambda recipe, target: Mtp(target, recipe.steps, recipe.seed),
    "dflash": lambda recipe, target: DFlash(
        target, recipe.layers, recipe.steps, target.rarest, recipe.seed, recipe.visible_prefix
    ),
    "redrafter": lambda recipe, target: Redrafter(
        target, recipe.hidden or target.model.shape.hidden, recipe.steps, recipe.seed
    ),
    "early-exit": lambda recipe, target: EarlyExit(target, recipe.hidden or recipe.rank, recipe.seed),
}


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The content of `training.json`. `target`: the digest of its config and weights; `held_out_agreement`: by step,
    how often the head's most likely token is the target's on passages of the `held_out` files that the target
    continues, given the true tokens before it."""

    recipe: HeadRecipe
    target: str
    python: str
    torch: str
    files: int
    parameters: int
    tokens_seen: int
    held_out_agreement: tuple[float, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of every stage."""

    recipe: HeadRecipe
    target: Llama
    config: dict[str, Any]
    tokenizer: Tokenizer
    identity: StoreIdentity
    text: Corpus
    device: torch.device

    def prompts(self, sources: Sequence[Source], part: int, size: int) -> Prompts:
        length, seed = self.recipe.length, self.recipe.seed
        return draw_prompts(sources, self.tokenizer, self.recipe.temps, length=length, seed=seed, part=part, size=size)


def build(recipe: HeadRecipe, target: Target) -> TrainableHead:
    """Returns an untrained head."""
    return _KINDS[recipe.kind](recipe, target)


def run(recipe: HeadRecipe, target: Path, out: Path, store: Path | None = None, extra: Sequence[Path] = ()) -> None:
    """Trains a head, and writes it to `out`. The target's text is kept in `store`, or until the end of the run.

    Raises:
        InvalidRequest: a setting or a folder can't be used.
        ModelError: the target can't be used.
    """
    check_out(out)
    device = pick_device()
    model = load_target(target, device)
    check(recipe, model.shape)
    text = corpus.gather(corpus.standard_library(), extra, seed=recipe.seed, held_out=recipe.held_out_files)
    identity = StoreIdentity(
        model_digest(target), text.digest(), recipe.seed, recipe.length, recipe.taps(model.shape), recipe.top,
        recipe.temps, recipe.part,
    )  # fmt: skip
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    inputs = Inputs(recipe, model, config, _load_tokenizer(target, model), identity, text, device)
    with workspace(out, {"recipe": asdict(recipe), "store": asdict(identity)}) as space:
        _make_head(inputs, space, store or space.partial / "text")
        space.publish()


def _make_head(inputs: Inputs, space: Workspace, folder: Path) -> None:
    recipe, device = inputs.recipe, inputs.device
    store = Store(folder, inputs.identity)
    store.fill(recipe.parts, inputs.target, lambda part: inputs.prompts(inputs.text.train, part, recipe.part))
    head = build(recipe, _target(inputs, store)).to(device)
    head.init_from(store.batch(np.arange(min(_INIT_WINDOWS, store.count)), device))
    loop = Loop(f"{recipe.kind} head", head, recipe.phases, recipe.batch_tokens)

    def loss_of(draws: Draws) -> Tensor:
        batch = store.batch(windows.draw(store.count, recipe.seed + draws.phase, draws.first, draws.size), device)
        with autocast(device):
            steps = head(batch)
        return loss(steps, head.output_weight, TargetTopK.of(batch.ids, batch.log_probs, head.draft_ids))

    loop.run(loss_of, space.partial / "head.pt")
    shares = _held_out_agreement(inputs, head, folder / "held-out")
    log.info("held-out agreement by step: %s", ", ".join(f"{share:.3f}" for share in shares))
    record = HeadRecord(
        recipe=recipe,
        target=inputs.identity.target,
        python=platform.python_version(),
        torch=torch.__version__,
        files=len(inputs.text.train),
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        tokens_seen=loop.tokens_seen(),
        held_out_agreement=shares,
        held_out=tuple(source.name for source in inputs.text.held_out),
    )
    space.clear_result()
    write_head(space.result, head, inputs.identity.target)
    write_json(space.result / FILE_NAME, asdict(record))


def _target(inputs: Inputs, store: Store) -> Target:
    """Returns the target. The head's vocabulary are the most frequent tokens of the text, in order of their ids."""
    vocab = inputs.target.shape.vocab
    ranked = np.argsort(-store.token_counts(vocab), kind="stable")
    vocab_ids = torch.from_numpy(np.sort(ranked[: inputs.recipe.vocab or vocab])).to(inputs.device)
    return Target(inputs.target, inputs.identity.taps, vocab_ids, int(ranked[-1]), inputs.config)


@torch.no_grad()
def _held_out_agreement(inputs: Inputs, head: TrainableHead, folder: Path) -> tuple[float, ...]:
    """Returns the agreement by step on text that the target generates after held-out files."""
    store = Store(folder, replace(inputs.identity, part=_HELD_OUT_WINDOWS))
    store.fill(1, inputs.target, lambda part: inputs.prompts(inputs.text.held_out, part, _HELD_OUT_WINDOWS))
    batch = store.batch(np.arange(_HELD_OUT_WINDOWS), inputs.device)
    head.eval()
    with autocast(inputs.device):
        target = TargetTopK.of(batch.ids, batch.log_probs, head.draft_ids)
        return agreement(head(batch), head.output_weight, target)


def _load_tokenizer(folder: Path, target: Llama) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; expected the target's, in the format of tokenizers")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > target.shape.vocab:
        raise ModelError(f"{path} has {tokenizer.get_vocab_size()} tokens, more than the target's {target.shape.vocab}")
    return tokenizer


def write_head(folder: Path, head: TrainableHead, target: str) -> None:
    """Writes a head in its published layout into the new `folder`. `target`: the digest of its target."""
    config, tensors = head.export()
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {**config, "target": target})
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(on_cpu, {"format": "pt"}))
