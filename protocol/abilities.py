"""What a target can do, found by trying when it is loaded. It says so in HELLO, and is asked for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.schema import Name, Text


@dataclass(frozen=True, slots=True)
class InProcessDrafter:
    """A drafter in the target's process, by the name that Verify calls it by.

    `model`: its files. `is_head`: it reads the target. `agreement`: in what share of the tokens of a trial text it said
    the target's own; -1: it was not tried. `weight`: a token of its chains over a step of the target, as
    tried at load, or where that was not tried its bytes of weights over the target's.
    """

    name: Name
    model: Name = ""
    is_head: bool = False
    agreement: float = -1.0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Abilities:
    """`chains`: it verifies several tokens in one forward, and forgets those that don't hold.

    Without, it decodes a token at a time, and `why` is the sentence about it. `own_caches`: the model's own caches
    stay, where usually simpler ones stand in that roll back at once. `takes_kv`: it goes on from keys and values that a
    prefill worker has made. `trees`: it verifies a tree of drafts, too. `drafters`: those in its own process;
    `left_out`: a sentence for each that it was to have and does without.
    """

    chains: bool = True
    own_caches: bool = False
    takes_kv: bool = False
    why: Text = ""
    trees: bool = False
    drafters: tuple[InProcessDrafter, ...] = ()
    left_out: tuple[Text, ...] = ()
