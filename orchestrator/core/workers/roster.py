"""Who is in the cluster and what they can do: what the rounds, the front and `outrider status` ask about the workers.

Reads the places and changes nothing. Knows nothing of sockets or requests.
"""

from __future__ import annotations

from outrider.orchestrator.core.workers.places import TARGET, Places
from outrider.orchestrator.core.workers.worker import reads_alike
from outrider.orchestrator.kv_room import KvRoom, kv_room
from outrider.orchestrator.machine.memory import physical
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.abilities import Abilities
from outrider.protocol.messages import WorkerStats


class Roster:
    """The workers that have a place, by name and by what they do."""

    def __init__(self, places: Places, settings: ServeSettings) -> None:
        self._places, self._settings = places, settings
        self._memory = physical()

    @property
    def ready(self) -> bool:
        """Every worker this cluster was meant to have is there, or is done without."""
        spawned = [worker for worker in self._places.all() if worker.spawned]
        return self.has_target() and all(worker.state in ("ready", "refused", "lost") for worker in spawned)

    @property
    def target_context(self) -> int:
        target = self._places.named(TARGET)
        return target.hello.context_length if target and target.hello else 0

    @property
    def target_abilities(self) -> Abilities:
        target = self._places.named(TARGET)
        return target.hello.abilities if target and target.hello else Abilities()

    @property
    def kv_room(self) -> KvRoom:
        """What texts may take in all workers that are there."""
        return kv_room(self._settings.kv_memory, self.stats(), self._memory)

    def notes(self) -> list[str]:
        """Why requests get less speculation than was asked for, a sentence each."""
        able = self.target_abilities
        drafters = [worker for worker in self._places.all() if worker.role == "draft" and worker.spawned]
        refused = [worker.fault for worker in drafters if worker.state in ("refused", "lost")]
        if not able.chains:
            return [f"speculation is off: {able.why}"]
        return [*(f"no draft model: {why}" for why in refused), *able.left_out]

    def is_target(self, name: str) -> bool:
        worker = self._places.named(name)
        return worker is not None and worker.role == "target"

    def drafters(self) -> set[str]:
        return {worker.name for worker in self._places.all() if worker.role == "draft" and worker.state == "ready"}

    def prefill_workers(self) -> set[str]:
        """Those of the target's own model, if it takes over what they read."""
        target = self._places.named(TARGET)
        if target is None or target.hello is None or not target.hello.abilities.takes_kv:
            return set()
        found = [worker for worker in self._places.all() if worker.role == "prefill" and worker.state == "ready"]
        return {worker.name for worker in found if worker.hello and reads_alike(worker.hello, target.hello)}

    def vocabulary(self, name: str) -> int:
        worker = self._places.named(name)
        return worker.hello.vocab_size if worker and worker.hello else 0

    def features(self, name: str) -> str:
        worker = self._places.named(name)
        return worker.hello.features if worker and worker.hello else ""

    def model(self, name: str) -> object:
        worker = self._places.named(name)
        return (worker.hello.vocab_size, worker.hello.parameters) if worker and worker.hello else None

    def has_target(self) -> bool:
        target = self._places.named(TARGET)
        return target is not None and target.entered

    def stats(self) -> tuple[WorkerStats, ...]:
        return tuple(worker.stats() for worker in self._places.all())
