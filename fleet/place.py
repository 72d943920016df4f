"""Who asks for an engine, and where it is: what gate and engine tell each other. Opens no socket."""

from __future__ import annotations

from dataclasses import dataclass

import ray


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's clients come to `endpoint`, whose server has `key`; empty: it asks for none, or a known one.

    `own`: where those of the same `host` (a node of Ray's) may come without keys; empty: nowhere.
    """

    endpoint: str
    key: str = ""
    own: str = ""
    host: str = ""

    def seen_from(self, host: str) -> Place:
        """The shortest way from there."""
        return Place(self.own) if self.own and host == self.host else self


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
