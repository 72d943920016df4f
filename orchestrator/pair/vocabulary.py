"""Do two models mean the same by the same token? What a draft must share with its target.

Knows tokenizers; knows nothing of processes. How text is split makes no difference (only the target's tokenizer splits
any), nor does padding: embedding rows beyond the last token, and tokens that are named as reserved or unused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.errors import ModelError

SAMPLES = 3
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_FILLER = re.compile(r"reserved|unused|placeholder|dummy|extra_\d|extra_id|^\W*control_\d|^\W*pad\W*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two vocabularies compare: tokens in both, and in words how they differ (empty: they don't)."""

    shared: int
    difference: str


def compare(target: TextCodec, draft: TextCodec) -> Comparison:
    """Compares what each token id stands for in one and in the other."""
    ours, theirs = _by_id(target), _by_id(draft)
    shared = ours.keys() & theirs.keys()
    unlike = sorted(i for i in shared if ours[i] != theirs[i] and not (_is_filler(ours[i]) or _is_filler(theirs[i])))
    if unlike:
        samples = ", ".join(f"{i} is {ours[i]!r} and {theirs[i]!r}" for i in unlike[:SAMPLES])
        told = f"{len(unlike)} of {len(shared)} tokens differ, such as {samples}"
        return Comparison(len(shared), told)
    for one, other, whose in ((ours, theirs, "the target's"), (theirs, ours, "the draft's")):
        alone = sorted(i for i in one.keys() - other.keys() if not _is_filler(one[i]))
        if alone:
            samples = ", ".join(f"{i} ({one[i]!r})" for i in alone[:SAMPLES])
            return Comparison(len(shared), f"{len(alone)} tokens are only in {whose} vocabulary, such as {samples}")
    return Comparison(len(shared), "")


def require_same(target: TextCodec, draft: TextCodec) -> None:
    """Refuses a draft whose tokens mean something else.

    Raises:
        ModelError: they do; the message says how.
    """
    difference = compare(target, draft).difference
    if difference:
        raise ModelError(
            f"the vocabularies of {target.model.name} and {draft.model.name} differ: {difference};"
            " use a draft model of the target's family (`outrider pairs` lists some)"
        )


def fingerprint(codec: TextCodec) -> str:
    """A digest of what the tokens stand for, equal on two machines whose models mean the same by them.

    Without names in brackets, in which models of one family differ and which are what `compare` lets pass, mostly.
    """
    ordinary = [(i, token) for i, token in _by_id(codec).items() if not _BRACKETED.fullmatch(token)]
    return hashlib.sha256(repr(sorted(ordinary)).encode()).hexdigest()[:32]


def _by_id(codec: TextCodec) -> dict[int, str]:
    return {token_id: token for token, token_id in codec.tokenizer.get_vocab(with_added_tokens=True).items()}


def _is_filler(token: str) -> bool:
    return bool(_FILLER.search(token)) and token.startswith(("<", "["))
