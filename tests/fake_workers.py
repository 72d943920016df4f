"""The base of fake workers that send only valid messages: a core that rejects one fails the test."""

from __future__ import annotations

from outrider.protocol.messages import Hello


class FakeWorkers:
    """The part of a core's worker pool that describes workers and counts their invalid messages."""

    def hello(self, name: str) -> Hello:
        """Returns a description: all drafters run the same model, and none needs the target's hidden states."""
        return Hello("draft", name, 0, "", "", 1 << 20, 0, 0, 0, incarnation=0)

    def prefill_workers(self) -> set[str]:
        """Returns no prefill workers."""
        return set()

    def record_invalid(self, name: str, kind: str) -> None:
        raise AssertionError(f"a valid message of {name} was counted as invalid: {kind}")
