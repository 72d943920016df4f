"""What a package's functions take and give: names, shapes, dtypes. The converter and the host both read it from here.

Slots are places in the cache, rows are the tokens of one call. Which slot a token's keys lie in is the host's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.drafting.coreml.package.architecture import Architecture

TREE_ROWS = (1, 8, 16, 32)
PREFILL_ROWS = 64
SCRATCH_SLOTS = 128  # slots beyond the context, for drafted tokens


class Mode(StrEnum):
    """Where the cache lives.

    STATELESS: with the host, which passes it in and gets the new rows back (what the Neural Engine takes most readily).
    HYBRID: in one state a layer and tensor, written in one run of slots a call.
    ONEHOT: in two states, written to any slots through a matrix of ones, without integers.
    """

    STATELESS = "stateless"
    HYBRID = "hybrid"
    ONEHOT = "onehot"

    @property
    def stateful(self) -> bool:
        return self is not Mode.STATELESS


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named input, output or state; `integer` is int32, otherwise the package's float type."""

    name: str
    shape: tuple[int, ...]
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a package: `rows` tokens at once. Without `logits` it only fills the cache (the prefill)."""

    name: str
    rows: int
    logits: bool


FUNCTIONS = (
    *(Function(f"q{rows}", rows, True) for rows in TREE_ROWS),
    Function(f"prefill{PREFILL_ROWS}", PREFILL_ROWS, False),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A package's sizes: `context` positions, `slots` >= context places in the cache; `weights` as in weights.KINDS."""

    architecture: Architecture
    mode: Mode
    weights: str
    context: int
    slots: int
    functions: tuple[Function, ...] = FUNCTIONS

    def inputs(self, function: Function) -> tuple[Tensor, ...]:
        sizes, rows = self.architecture, function.rows
        common = (
            Tensor("x", (1, sizes.hidden, 1, rows)),
            Tensor("cos", (1, 1, rows, sizes.head_dim)),
            Tensor("sin", (1, 1, rows, sizes.head_dim)),
            Tensor("mask", (1, 1, rows, self.slots + rows)),
        )
        match self.mode:
            case Mode.STATELESS:
                past = (sizes.layers, sizes.kv_heads, self.slots, sizes.head_dim)
                return (*common, Tensor("k_past", past), Tensor("v_past", past))
            case Mode.HYBRID:
                return (*common, Tensor("pos", (1,), integer=True))
            case Mode.ONEHOT:
                return (*common, Tensor("write", (1, 1, self.slots, rows)))

    def states(self) -> tuple[Tensor, ...]:
        sizes = self.architecture
        match self.mode:
            case Mode.STATELESS:
                return ()
            case Mode.HYBRID:
                one = (1, sizes.kv_heads, self.slots, sizes.head_dim)
                return tuple(Tensor(f"{kind}_state_{layer}", one) for layer in range(sizes.layers) for kind in "kv")
            case Mode.ONEHOT:
                whole = (sizes.layers, sizes.kv_heads, self.slots, sizes.head_dim)
                return (Tensor("k_state", whole), Tensor("v_state", whole))

    def outputs(self, function: Function) -> tuple[Tensor, ...]:
        """`k_new` and `v_new` first, where the host needs them: without a state, and from every prefill."""
        sizes, rows = self.architecture, function.rows
        fresh = (sizes.layers, sizes.kv_heads, rows, sizes.head_dim)
        outputs: tuple[Tensor, ...] = ()
        if not self.mode.stateful or not function.logits:
            outputs = (Tensor("k_new", fresh), Tensor("v_new", fresh))
        if function.logits:
            chunks = enumerate(sizes.head_chunks)
            outputs += tuple(Tensor(f"logits_{index}", (1, count, 1, rows)) for index, count in chunks)
        return outputs

    def smallest(self, rows: int) -> Function | None:
        """The smallest function with logits for at least `rows` rows, or None."""
        fitting = [function for function in self.functions if function.logits and function.rows >= rows]
        return min(fitting, key=lambda function: function.rows, default=None)

    @property
    def largest(self) -> Function:
        """The function with logits that takes most rows."""
        return max((function for function in self.functions if function.logits), key=lambda function: function.rows)

    @property
    def prefill(self) -> Function:
        """The function without logits."""
        return next(function for function in self.functions if not function.logits)
