"""The recipe of a pair: model shapes, training phases, presets, and their checks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.protocol.errors import InvalidRequest

_LONG_SHARE = 0.085  # share of the target's tokens at full context, after the cheaper short windows


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape. Sizes in elements, `context` in tokens; `tied`: the embedding is also the output layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    context: int
    norm_epsilon: float = 1e-5
    rope_base: float = 10_000.0
    tied: bool = True
    own_head_dim: int | None = None  # None: hidden / heads

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Phase:
    """`tokens` in windows of `length`, with a warm-up to a peak learning `rate` and a cosine decay."""

    tokens: int
    length: int
    rate: float

    def steps(self, batch_tokens: int) -> int:
        return max(1, self.tokens // (self.windows(batch_tokens) * self.length))

    def windows(self, batch_tokens: int) -> int:
        """Returns the number of windows in a batch."""
        return max(1, batch_tokens // self.length)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. Equal recipes on equal text give the same pair, up to the device's rounding."""

    preset: str
    seed: int
    target: Shape
    draft: Shape
    target_phases: tuple[Phase, ...]
    draft_phases: tuple[Phase, ...]
    batch_tokens: int
    teacher_top: int  # most likely tokens of the teacher that are stored per position
    held_out_files: int
    max_characters: int | None  # of training text; None takes all


def preset(
    name: str,
    *,
    seed: int = 0,
    target_tokens: int | None = None,
    draft_tokens: int | None = None,
    batch_tokens: int | None = None,
) -> Recipe:
    """Returns the recipe `name` with these settings. Raises InvalidRequest for a value out of range."""
    if name not in PRESETS:
        raise InvalidRequest(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    base = PRESETS[name]
    recipe = replace(base, seed=seed, batch_tokens=base.batch_tokens if batch_tokens is None else batch_tokens)
    if target_tokens is not None:
        recipe = replace(recipe, target_phases=_target_phases(target_tokens, base.target_phases))
    if draft_tokens is not None:
        recipe = replace(recipe, draft_phases=(replace(base.draft_phases[0], tokens=draft_tokens),))
    _check(recipe)
    return recipe


def _target_phases(tokens: int, base: tuple[Phase, ...]) -> tuple[Phase, ...]:
    long_tokens = round(tokens * _LONG_SHARE)
    return (replace(base[0], tokens=tokens - long_tokens), replace(base[1], tokens=long_tokens))


def _check(recipe: Recipe) -> None:
    context = recipe.target.context
    if not 0 <= recipe.seed < 2**32:
        raise InvalidRequest(f"the seed must lie between 0 and {2**32 - 1}, not {recipe.seed}")
    if not context <= recipe.batch_tokens <= 2**24:
        raise InvalidRequest(f"a batch must have between {context} and {2**24} tokens, not {recipe.batch_tokens}")
    for what, phases in (("target", recipe.target_phases), ("draft", recipe.draft_phases)):
        tokens = sum(phase.tokens for phase in phases)
        if tokens < recipe.batch_tokens:
            raise InvalidRequest(
                f"the {what} needs at least one batch, {recipe.batch_tokens} tokens, not {tokens}; raise its tokens"
            )


PRESETS = {
    "tiny": Recipe(
        preset="tiny",
        seed=0,
        target=Shape(hidden=640, layers=4, heads=10, kv_heads=2, mlp=1728, vocab=4096, context=1024),
        draft=Shape(hidden=256, layers=3, heads=4, kv_heads=2, mlp=704, vocab=4096, context=1024),
        target_phases=_target_phases(7_650_000, (Phase(0, 256, 1.5e-3), Phase(0, 1024, 2e-4))),
        draft_phases=(Phase(5_000_000, 1024, 3e-3),),
        batch_tokens=4096,
        teacher_top=32,
        held_out_files=40,
        max_characters=None,
    ),
    "toy": Recipe(
        preset="toy",
        seed=0,
        target=Shape(hidden=128, layers=2, heads=4, kv_heads=2, mlp=256, vocab=512, context=128),
        draft=Shape(hidden=64, layers=1, heads=2, kv_heads=1, mlp=128, vocab=512, context=128),
        target_phases=_target_phases(400_000, (Phase(0, 64, 3e-3), Phase(0, 128, 5e-4))),
        draft_phases=(Phase(300_000, 128, 5e-3),),
        batch_tokens=1024,
        teacher_top=16,
        held_out_files=4,
        max_characters=500_000,
    ),
}
