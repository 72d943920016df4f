"""Workers in tests say nothing that cannot be: a cluster that is played and takes their word for a lie fails."""

from __future__ import annotations

from outrider.protocol.messages import Hello


class HonestWorkers:
    """The part of a core's workers that judges them."""

    def hello(self, name: str) -> Hello:
        """All run the same model, and nobody reads the target's rows."""
        return Hello("draft", name, 0, 0, "", "", 1 << 20, 0, 0, 0)

    def prefill_workers(self) -> set[str]:
        """There are none."""
        return set()

    def record_invalid(self, name: str, kind: str) -> None:
        raise AssertionError(f"{name} is honest, and was taken for a liar: {kind}")
