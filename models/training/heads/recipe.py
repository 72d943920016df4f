"""The recipe of a head: its kind, sizes, text and training, and their checks. Has no dependency on torch or files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from models.training.recipe import Phase, Shape
from outrider.protocol.errors import InvalidRequest

KINDS = ("eagle3", "mtp", "dflash", "redrafter", "early-exit")
_OF_BLOCKS = ("dflash",)
_OWN_WORDS = ("eagle3",)
_OWN_WIDTH = ("eagle3", "redrafter", "early-exit")


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """One training run. None: the target's value. `hidden`: the width of the head, or the rank of an adapter.
    `text_tokens`: written by the target, in windows of `length`."""

    kind: str
    seed: int = 0
    hidden: int | None = None
    vocab: int | None = None  # tokens that it can draft, the most frequent ones
    steps: int = 4  # length of the chains that it learns to draft
    layers: int = 2  # of a block head
    visible_prefix: bool = False  # a block head trains with known first tokens in its blocks
    rank: int = 128  # of an adapter without `hidden`
    text_tokens: int = 2_000_000
    tokens: int = 4_000_000  # of training
    length: int = 512
    rate: float = 1.5e-3
    batch_tokens: int = 2048
    part: int = 256  # windows that the target writes together
    top: int = 32  # likely tokens stored per position; the rest is one lump
    temps: tuple[float, ...] = (0.0, 0.8, 0.8, 0.8)  # of the text, with these frequencies
    held_out_files: int = 40

    @property
    def parts(self) -> int:
        """The number of parts of text."""
        return max(1, round(self.text_tokens / (self.part * self.length)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Two phases: the head is usable after the first, and the second improves it."""
        half = self.tokens // 2
        return (Phase(half, self.length, self.rate), Phase(half, self.length, self.rate / 2))

    def taps(self, target: Shape) -> tuple[int, ...]:
        """Returns the layers with stored rows: the first, the middle and the last."""
        return tuple(sorted({0, max(0, target.layers // 2 - 1), target.layers - 1}))

    def shape(self, target: Shape) -> Shape:
        """Returns the head's shape, in the target's proportions."""
        hidden = self.hidden or target.hidden
        heads = hidden // target.head_dim
        return replace(
            target,
            hidden=hidden,
            layers=1,
            heads=heads,
            kv_heads=gcd(heads, target.kv_heads),
            mlp=-(-target.mlp * hidden // target.hidden // 64) * 64,
            vocab=self.vocab or target.vocab,
            tied=False,
            own_head_dim=target.head_dim,
        )


def check(recipe: HeadRecipe, target: Shape) -> None:
    """Raises InvalidRequest if the recipe is invalid for this target."""
    if recipe.kind not in KINDS:
        raise InvalidRequest(f"unknown head {recipe.kind!r}; expected one of {', '.join(KINDS)}")
    if not 0 <= recipe.seed < 2**32:
        raise InvalidRequest(f"the seed must lie between 0 and {2**32 - 1}, not {recipe.seed}")
    if recipe.vocab is not None and recipe.kind not in _OWN_WORDS:
        raise InvalidRequest(f"{recipe.kind} heads always draft all of the target's tokens; omit --vocab")
    if recipe.hidden is not None and recipe.kind not in _OWN_WIDTH:
        raise InvalidRequest(f"{recipe.kind} heads are as wide as their target; omit --hidden")
    if recipe.visible_prefix and recipe.kind not in _OF_BLOCKS:
        raise InvalidRequest(f"{recipe.kind} heads draft no blocks with prefixes; omit --visible-prefix")
    hidden, vocab = recipe.hidden or target.hidden, recipe.vocab or target.vocab
    if hidden < target.head_dim or hidden % target.head_dim or hidden > target.hidden:
        raise InvalidRequest(
            f"a head's width must be a multiple of {target.head_dim} up to {target.hidden}, the target's, not {hidden}"
        )
    if not recipe.top < vocab <= target.vocab:
        raise InvalidRequest(f"a head for this target can have {recipe.top + 1} to {target.vocab} tokens, not {vocab}")
    if not 1 <= recipe.steps <= 16:
        raise InvalidRequest(f"a head can learn 1 to 16 steps, not {recipe.steps}")
    if not recipe.steps + 1 < recipe.length <= target.context:
        raise InvalidRequest(
            f"windows must be longer than the {recipe.steps} steps and at most {target.context}, the target's context,"
            f" not {recipe.length}"
        )
    for what, tokens in (("text", recipe.text_tokens), ("training", recipe.tokens)):
        if tokens < recipe.batch_tokens:
            raise InvalidRequest(f"expected at least a batch, {recipe.batch_tokens} tokens, of {what}, not {tokens}")
    if not 0 < recipe.rate < 1:
        raise InvalidRequest(f"the learning rate must lie between 0 and 1, not {recipe.rate}")
    if recipe.batch_tokens < recipe.length:
        raise InvalidRequest(f"a batch must have at least a window, {recipe.length} tokens, not {recipe.batch_tokens}")
