"""What past rounds taught: how often each chain position is accepted, and at which rank the bonus token was found.

Counts only; knows nothing of branches or budgets. Old rounds fade, so the estimates follow the text.
"""

from __future__ import annotations

MAX_RANK = 8
FADE = 0.995

# A mild prior, worth `PRIOR_ROUNDS` rounds: acceptance 0.75; the rank of the bonus falls off as a power law, steeper
# after full acceptance, where the bonus is the target's plain choice rather than its second thought.
PRIOR_ROUNDS = 8.0
PRIOR_ACCEPTANCE = 0.75
PRIOR_RANKS_REJECTED = tuple(0.5 / (rank + 1) ** 1.5 for rank in range(MAX_RANK))
PRIOR_RANKS_FULL = tuple(0.8 / (rank + 1) ** 2.5 for rank in range(MAX_RANK))


class Calibration:
    """Live estimates behind the fan-out: `acceptance(i)` and `rank_share(full, rank)`."""

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._held: list[float] = []
        self._ranks = {full: [0.0] * MAX_RANK for full in (False, True)}
        self._seen = {False: 0.0, True: 0.0}

    def learn(self, chain_length: int, accepted: int, rank: int | None) -> None:
        """One outcome: `accepted` of `chain_length` held, and the bonus stood at `rank` (None: beyond the candidates).
        """
        while len(self._tried) < chain_length:
            self._tried.append(0.0)
            self._held.append(0.0)
        for position in range(min(accepted + 1, chain_length)):
            self._tried[position] = self._tried[position] * FADE + 1.0
            self._held[position] = self._held[position] * FADE + (1.0 if position < accepted else 0.0)
        full = accepted == chain_length
        self._seen[full] = self._seen[full] * FADE + 1.0
        ranks = self._ranks[full]
        for index in range(MAX_RANK):
            ranks[index] *= FADE
        if rank is not None and rank < MAX_RANK:
            ranks[rank] += 1.0

    def acceptance(self, position: int) -> float:
        """Probability that chain token `position` holds, given that all before it held."""
        tried = self._tried[position] if position < len(self._tried) else 0.0
        held = self._held[position] if position < len(self._held) else 0.0
        return (held + PRIOR_ROUNDS * PRIOR_ACCEPTANCE) / (tried + PRIOR_ROUNDS)

    def rank_share(self, full: bool, rank: int) -> float:
        """Probability that the bonus token is the drafter's candidate number `rank` (its chain's own token left out).
        """
        prior = (PRIOR_RANKS_FULL if full else PRIOR_RANKS_REJECTED)[min(rank, MAX_RANK - 1)]
        counted = self._ranks[full][rank] if rank < MAX_RANK else 0.0
        return (counted + PRIOR_ROUNDS * prior) / (self._seen[full] + PRIOR_ROUNDS)
