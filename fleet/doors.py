"""A key of one actor's own, and whose keys it lets in: in a directory that goes with the actor, however that goes."""

from __future__ import annotations

import threading

from outrider.orchestrator.machine.sweeper import Sweeper
from outrider.protocol.directory import private_directory
from outrider.protocol.keyring import Allowed, Keyring
from outrider.protocol.keys import parse_key


class Doors:
    """`folder` is where the keys are, `key` the public half of the own one. Any thread may open and shut."""

    def __init__(self) -> None:
        self._directory = private_directory()
        self._sweeper = Sweeper(self._directory.path, None)
        self._ring = Keyring(self._directory.path / "keys")
        self._changing = threading.Lock()
        self.folder = self._ring.folder
        self.key = self._ring.make().public

    def open(self, role: str, key: str) -> None:
        """Lets whoever has this key in as a `role` (client, drafter).

        Raises:
            KeyFault: it is no key.
        """
        with self._changing:
            self._ring.allow(Allowed(role, parse_key(key), f"{role}-{key}"))

    def shut(self, key: str) -> None:
        """Lets that key in no more."""
        with self._changing:
            self._ring.revoke(key)
