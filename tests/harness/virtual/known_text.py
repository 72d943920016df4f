"""Verifies drafted chains and trees against a known text, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.messages import Verify
from outrider.protocol.trees import accepted_path, chain_parents, node_depths


def accepted_nodes(text: Sequence[int], verify: Verify) -> tuple[int, ...]:
    """Returns the accepted nodes of a verified chain or tree."""
    parents, rest = verify.parents or chain_parents(len(verify.chain)), text[verify.base_len :]
    choices = [rest[place] if place < len(rest) else 0 for place in (0, *(depth + 1 for depth in node_depths(parents)))]
    return accepted_path(verify.chain, parents, choices)


def outcome_path(nodes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the `path` of an OUTCOME with these accepted nodes: None for a chain."""
    return None if nodes == tuple(range(len(nodes))) else nodes
