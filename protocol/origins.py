"""Where a committed token came from: what the chunks of a request that asked for it carry, a number a token."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """Who said a token first. All but the target's own were drafted and accepted: `draft_n_accepted` counts them."""

    TARGET = 0
    """The target's own: plain decoding, and the token after the accepted part of a chain."""
    PREPARED = 1
    """From a branch that was drafted for this outcome before it was known."""
    DRAFTED = 2
    """Drafted just in time, once the tokens before it were known."""
    COPIED = 3
    """Copied from the text, which had been in the same place before."""
    HEAD = 4
    """Drafted just in time by a head that reads the target, in its process."""
    GUESSED = 5
    """Beside a chain's token: what its drafter thought next best."""
