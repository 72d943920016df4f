"""Who is let in at the workers' socket, and who may stay: by key, by what it says of itself, by what its model speaks.

Reads the places and asks the gate; sends nothing and changes nothing but the keys that the gate refuses.
"""

from __future__ import annotations

import zmq

from outrider.orchestrator.core.workers.places import Places
from outrider.orchestrator.events import Speaks
from outrider.orchestrator.gate import Gate
from outrider.protocol.keyring import DRAFTER, PREFILL
from outrider.protocol.keys import ServerKeys, key_shown
from outrider.protocol.messages import Hello

NOT_ALLOWED = "its key is not allowed (any more); allow it on the server with `outrider keys allow`"


class Entry:
    """`gate`: who asks for keys; None: nobody does. `language`: what tokens mean in this cluster, once it is known."""

    def __init__(self, places: Places, gate: Gate | None) -> None:
        self._places, self._gate = places, gate
        self.language = Speaks("", "")

    @property
    def keys(self) -> ServerKeys | None:
        """What an endpoint for workers of other machines is bound with, where it is to ask for keys."""
        return self._gate.keys(DRAFTER) if self._gate is not None else None

    def refuse_key(self, key: str, why: str) -> None:
        """Lets it in no more, and sends away who is here with it; an empty one is nobody's."""
        if self._gate is not None and key:
            self._gate.refuse(key, why)

    def may_stay(self, role: str, key: str) -> bool:
        allowed = PREFILL if role == "prefill" else DRAFTER  # who reads prompts is trusted with the text
        return self._gate is not None and self._gate.lets_in(allowed, key)

    def is_impostor(self, identity: bytes, first: zmq.Frame) -> bool:
        """Whether it has taken over a routing id whose owner came in with another key, or without one."""
        worker = self._places.at(identity) if self._gate is not None else None
        return worker is not None and worker.key != key_shown(first)

    def refusal(self, identity: bytes, hello: Hello, key: str) -> str | None:
        """Why a stranger may not join; None when it may."""
        if key and not self.may_stay(hello.role, key):  # its connection is from when it still might
            return NOT_ALLOWED
        if key and hello.role == "target":
            return "its key is for drafters; expected a target's rank 0 on the server's machine, by its local endpoint"
        if not all(text.isprintable() for text in (hello.backend, hello.model, hello.note, hello.files)):
            return "its description is not printable text"
        ours, theirs = self.language, hello.vocabulary
        if theirs and ours.vocabulary and theirs != ours.vocabulary:
            return (
                f"its model {hello.model} has another vocabulary than this cluster's {ours.model}; expected a"
                " draft of the target's own family (`outrider pairs` lists some)"
            )
        return self._places.refusal(identity, hello)
