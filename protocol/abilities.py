"""What a target can do, found by trying when it is loaded. It says so in HELLO, and is asked for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.fields import Text


@dataclass(frozen=True, slots=True)
class Abilities:
    """`chains`: it verifies several tokens in one forward, and forgets those that don't hold.

    Without, it decodes a token at a time, and `why` is the sentence about it. `own_caches`: the model's own caches
    stay, where usually simpler ones stand in that roll back at once. `takes_kv`: it goes on from keys and values that a
    prefill worker has made. `trees`: it verifies a tree of drafts, too.
    """

    chains: bool = True
    own_caches: bool = False
    takes_kv: bool = False
    why: Text = ""
    trees: bool = False
