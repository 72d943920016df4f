"""The kinds of heads that can be made."""

from __future__ import annotations

from torch import Tensor

from models.training.heads.eagle3 import Eagle3
from models.training.heads.learner import Learner
from models.training.heads.recipe import HeadRecipe
from models.training.llama import Llama


def build(recipe: HeadRecipe, target: Llama, taps: tuple[int, ...], ids: Tensor) -> Learner:
    """A fresh one. `ids` [V_d]: the target's tokens that it is to know."""
    return Eagle3(recipe.shape(target.shape), target, taps, ids, recipe.steps, recipe.seed)
