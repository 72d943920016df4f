"""What a prompt looks like, where that says who drafts best: code and prose are each best drafted by another.

A count of characters, no more: in nine of ten pieces of Python more than one character in twenty is a sign, in nine of
ten pieces of prose and Markdown fewer are. What a prompt asks for it does not know.
"""

from __future__ import annotations

NEWEST = 512  # of a prompt's tokens
SHORTEST = 80  # characters that tell anything
SHARE = 0.05
SIGNS = frozenset('{}[]();=_<>/\\#:"*+|&')


def is_code(text: str) -> bool:
    """Whether a prompt's end looks like a program, or anything else that is written with many signs."""
    return len(text) >= SHORTEST and sum(char in SIGNS for char in text) > SHARE * len(text)
