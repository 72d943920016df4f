"""What a target can do, found by checks when it is loaded. Hello reports it, and nothing else is requested of the
target.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.schema import Name, Text


@dataclass(frozen=True, slots=True)
class InProcessDrafter:
    """A drafter in the target's process, under the name that Verify uses.

    `model` names its files. `is_head`: it reads the target's hidden states. `agreement` is the share of a trial text's
    tokens for which it proposed the target's own; -1: not tried. `weight` is the cost of a token of its chains relative
    to a step of the target, measured at load, or else the ratio of their bytes of weights.
    """

    name: Name
    model: Name = ""
    is_head: bool = False
    agreement: float = -1.0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Abilities:
    """`chains`: the target verifies several tokens in one forward and can roll back the rejected ones.

    Without `chains` it decodes one token at a time, and `why` explains it. `own_caches`: the model keeps its own caches
    instead of the simpler ones that roll back at once. `takes_kv`: it can continue from keys and values of a prefill
    worker. `trees`: it verifies trees of drafts, too. `drafters` are those in its process; `left_out` has a sentence
    for each that was requested and could not be used.
    """

    chains: bool = True
    own_caches: bool = False
    takes_kv: bool = False
    why: Text = ""
    trees: bool = False
    drafters: tuple[InProcessDrafter, ...] = ()
    left_out: tuple[Text, ...] = ()
