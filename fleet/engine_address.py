"""What gate and engine tell each other: who asks, where an engine is, and by which keys.

`EngineAddress`: who asks for an engine, and where it is: what gate and engine tell each other. Opens no socket.

`ActorKeys`: a key of one actor's own, and whose keys it lets in: in a directory that goes with the actor, however that
goes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import ray

from outrider.orchestrator.machine.spawn import Sweeper
from outrider.protocol.keys import AllowedKey, Keyring, parse_key
from outrider.protocol.socket_files import private_directory


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's clients come to `endpoint`, whose server has `key`; empty: it asks for none, or a known one.

    `own`: where those of the same `host` (a node of Ray's) may come without keys; empty: nowhere.
    """

    endpoint: str
    key: str = ""
    own: str = ""
    host: str = ""

    def seen_from(self, host: str) -> EngineAddress:
        """The shortest way from there."""
        return EngineAddress(self.own) if self.own and host == self.host else self


@dataclass(frozen=True, slots=True)
class Visitor:
    """A gate: the public `key` that it comes with, and its actor's name."""

    key: str
    actor: str
    namespace: str

    def is_there(self) -> bool:
        """Whether its actor lives. Asks Ray, which may take a while."""
        try:
            ray.get_actor(self.actor, self.namespace)
        except ValueError:
            return False
        return True


def visitor(key: str) -> Visitor:
    """This actor, with that key. Its namespace is Serve's, not the one that Ray says it runs in."""
    own = ray.get_runtime_context().get_actor_name() or ""
    named = ray.util.list_named_actors(all_namespaces=True)
    return Visitor(key, own, next(one["namespace"] for one in named if one["name"] == own))


class ActorKeys:
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
            self._ring.allow(AllowedKey(role, parse_key(key), f"{role}-{key}"))

    def shut(self, key: str) -> None:
        """Lets that key in no more."""
        with self._changing:
            self._ring.revoke(key)
