"""The kinds of heads that can be trained."""

from __future__ import annotations

from collections.abc import Callable

from models.training.heads.dflash import DFlash
from models.training.heads.eagle3 import Eagle3
from models.training.heads.early_exit import EarlyExit
from models.training.heads.learner import Learner, Subject
from models.training.heads.mtp import Mtp
from models.training.heads.recipe import HeadRecipe
from models.training.heads.redrafter import Redrafter

_Make = Callable[[HeadRecipe, Subject], Learner]

_KINDS: dict[str, _Make] = {
    "eagle3": lambda made, subject: Eagle3(subject, made.shape(subject.model.shape), made.steps, made.seed),
    "mtp": lambda made, subject: Mtp(subject, made.steps, made.seed),
    "dflash": lambda made, subject: DFlash(
        subject, made.layers, made.steps, subject.rarest, made.seed, made.visible_prefix
    ),
    "redrafter": lambda made, subject: Redrafter(
        subject, made.hidden or subject.model.shape.hidden, made.steps, made.seed
    ),
    "early-exit": lambda made, subject: EarlyExit(subject, made.hidden or made.rank, made.seed),
}


def build(made: HeadRecipe, subject: Subject) -> Learner:
    """Returns an untrained head of a recipe."""
    return _KINDS[made.kind](made, subject)
