"""Workers in tests say nothing that cannot be: a cluster that is played and takes their word for a lie fails."""

from __future__ import annotations


class HonestWorkers:
    """The part of a core's workers that judges them."""

    def vocabulary(self, name: str) -> int:
        return 1 << 20

    def prefill_workers(self) -> set[str]:
        """There are none."""
        return set()

    def features(self, name: str) -> str:
        """Nobody reads the target's rows."""
        return ""

    def model(self, name: str) -> object:
        """All run the same."""

    def record_invalid(self, name: str, kind: str) -> None:
        raise AssertionError(f"{name} is honest, and was taken for a liar: {kind}")
