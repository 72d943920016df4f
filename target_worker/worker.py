"""The target worker's loop: receives messages about requests, sends outcomes, runs one forward over all requests.

Owns a `TargetRequest` for each request. Answers a repeated VERIFY with its latest outcomes, drops stale messages,
sends RESYNC if the committed lengths disagree, and closes requests without a message for a long time. Knows nothing of
drafters in other processes, or of text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import mlx.core as mx

from outrider.engine import memory
from outrider.engine.kv_cache import PREFILL, CacheSlot, FlatKVCache, KVCache
from outrider.engine.load_checks import open_kv_cache, sequence_cost
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.compiler import Compiler
from outrider.grammar.constraint import Constraint
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import (
    Close,
    Halt,
    KvMemory,
    Message,
    Open,
    Prefilled,
    Prepare,
    PromptKv,
    Resync,
    Shutdown,
    Verify,
    WorkerNote,
)
from outrider.protocol.stats import CacheUse, KvCost
from outrider.protocol.worker_link import WorkerLink, WorkerLoop
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.model_runner import ModelRunner, VerifyResult
from outrider.target_worker.prefix_reuse import KVImport, PrefixReuse
from outrider.target_worker.ranks import RankLeader
from outrider.target_worker.target_request import FeatureListener, FeaturePublisher, TargetRequest, opening

log = logging.getLogger(__name__)

# How long requests that can continue wait for messages about others, which then join the same forward.
GRACE_MS = 1.0
CLEAR_EVERY = 256  # forwards


class TargetWorker(WorkerLoop[TargetRequest]):
    """Serves requests from `link` with `model` until SHUTDOWN.

    `own`: the in-process drafters; `publisher`: sends features to a head in another process. For a sharded model,
    `leader` leads the other ranks, and `kv_cache` is shared by all. `runner` may be replaced before `run`.
    """

    _link: WorkerLink

    def __init__(
        self,
        link: WorkerLink,
        model: LoadedModel,
        own: InProcessDrafters | None = None,
        kv_cache: KVCache | None = None,
        leader: RankLeader | None = None,
        publisher: FeaturePublisher | None = None,
    ) -> None:
        super().__init__(link)
        self._model = model
        self._leader = leader
        self._kv_cache = kv_cache or open_kv_cache(model)
        self.runner = ModelRunner()
        self._drafters = own or InProcessDrafters({})
        self._publisher = publisher
        self._drafters.read(model, self._kv_cache, publisher)
        self._kv_import = KVImport(model, self._kv_cache) if isinstance(self._kv_cache, FlatKVCache) else None
        self._prefixes = PrefixReuse(PromptCache(sequence_cost(self._kv_cache)), model.context_length)
        self._compiler = Compiler(model.folder)
        self._peak_memory = memory.PeakMemory()
        self._forwards = 0
        self._ending = False

    @property
    def takes_kv(self) -> bool:
        """True if a prefill worker can read prompts: no head needs the target's hidden states of them."""
        return self._kv_import is not None and not self._drafters.reads

    @property
    def kv(self) -> KvCost:
        """The memory of a request's text, including in-process drafters."""
        return self._prefixes.cache.cost + self._drafters.cost

    @property
    def _cache_use(self) -> CacheUse:
        return self._prefixes.cache.use

    @property
    def verifies_trees(self) -> bool:
        """True if it verifies trees of drafts."""
        return self._kv_cache.trees

    def turn(self) -> bool:
        """Handles waiting messages, then begins a forward or ends the one under way. Returns False on SHUTDOWN."""
        self._listen(wait=not self._has_work)
        self._wait_for_others()
        if self._ending:
            return False
        self._wake()
        self._link.expect(self.runner.expected_ms(self._running.values()))
        settled, readers = self.runner.advance(tuple(self._running.values()))
        self._listen(wait=False)  # chains prepared meanwhile decide how requests continue
        answers = [answer for result in settled if (answer := self._answer(result)) is not None]
        features = self._features([*(result.running for result in settled), *readers])
        messages = [*features, *answers, *_progress(readers)]
        if messages:
            self._link.send(*messages)
        for reader in readers:
            self._prefixes.read(reader)
        self._forwards += 1
        if self._forwards % CLEAR_EVERY == 0:
            mx.clear_cache()
        return not self._ending

    @property
    def _has_work(self) -> bool:
        running = self._running.values()
        return self.runner.is_busy or any(r.has_next or (r.unread and not (r.over or r.offered)) for r in running)

    def _listen(self, wait: bool) -> None:
        message = self._link.receive(wait=wait)
        while message is not None:
            self._handle(message)
            message = self._link.receive(wait=wait and not self._has_work and not self._ending)

    def _wait_for_others(self) -> None:
        """Waits a moment for messages with which other requests could join the next forward."""
        while not self._ending and not self.runner.is_busy and self._has_work:
            since_ns = clock.now() - int(GRACE_MS * clock.MILLISECOND_NS)
            awaited = [r for r in self._running.values() if r.answers and not r.over and not r.has_next]
            if not any(r.answers[-1].work.ended_ns > since_ns for r in awaited):
                return
            self._link.poll(GRACE_MS)
            self._listen(wait=False)

    def _handle(self, message: Message) -> None:
        running = self._running.get(getattr(message, "request", ""))
        try:
            match message:
                case Open():
                    self._open(message)
                case Verify():
                    self._verify(message)
                case Prepare() if running is not None:
                    running.prepared = message
                case PromptKv() if running is not None:
                    self._import_kv(running, message)
                case Halt() if running is not None and running.epoch == message.epoch:
                    running.halt()
                case Prepare() | PromptKv() | Halt():
                    pass  # the request has ended, or begun again
                case Close():
                    self._close(message.request)
                case KvMemory():
                    self._allow(message)
                case Shutdown():
                    self._ending = True
                case _:
                    log.warning("a target can't handle %s", type(message).__name__)
        except OutriderError as error:
            self._fault(getattr(message, "request", None), error)

    def _fault(self, request: str | None, error: OutriderError) -> None:
        """Ends the request; if a rank was lost, ends the worker instead."""
        if self._leader is not None:
            self._leader.assure()
        running = self._running.get(request or "")
        self._fail(request, error, running.round + 1 if running is not None else None)

    def _open(self, message: Open) -> None:
        known = self._running.get(message.request)
        if known is not None and message.epoch <= known.epoch:
            self._drop_stale(message)
            return
        self._close(message.request)
        self._forget_silent(lambda running: running.waits_since_ns)
        if not self._running:
            self._peak_memory.restart()
        tokens = message.tokens.tolist()
        slot = CacheSlot(self._model, self._kv_cache, tokens, message.sampling, self._constraint(message))
        listener = None
        if self._publisher is not None and message.features:
            listener = FeatureListener(message.request, message.epoch, self._publisher.reach)
        sessions = self._drafters.sessions_of(
            slot,
            message.sampling,
            lambda done, total: self._listen(wait=False),  # while a drafter reads a long text
            lambda: self._constraint(message),
            listener.on_features if listener is not None else None,
        )
        running = TargetRequest(slot, message, sessions, opened_ns=clock.now(), listener=listener)
        running.on_verify(opening(message))
        others = tuple(self._running.values())
        self._running[message.request] = running
        self._prefixes.open(running, others)
        running.offered = message.offered and self._kv_import is not None and running.awaits is None
        self._say_cached(running)
        self._report()

    def _constraint(self, message: Open) -> Constraint | None:
        return self._compiler.constraint_for(message.sampling, message.eos, message.prompt_len)

    def _import_kv(self, running: TargetRequest, message: PromptKv) -> None:
        if self._kv_import is not None and running.epoch == message.epoch and running.offered:
            self._kv_import.take(running, message)
            for progress in _progress([running]):
                self._link.send(progress)

    def _release(self, running: TargetRequest, spoilt: bool) -> None:
        running.close(spoilt)
        self._prefixes.close(running, spoilt)
        self._peak_memory.ended(idle=not self._running)

    def _allow(self, message: KvMemory) -> None:
        """Sets the memory for all texts; in-process drafters get shares by the memory of a text in them."""
        memory.set_limits(self._model.weight_bytes + self._drafters.weight_bytes, message.limit)
        if self._leader is not None:
            self._leader.broadcast(message)
        limit = message.limit if message.prompt_cache else 0
        self._prefixes.cache.allow(self._drafters.allow(limit, self._model.context_length, self.kv))
        self._report()

    def _wake(self) -> None:
        """Continues requests that waited until another one had read their common beginning."""
        for running in [r for r in self._running.values() if r.awaits is not None and r.awaits.is_there]:
            try:
                self._prefixes.begin(running)
                self._say_cached(running)
                self._report()
            except OutriderError as error:
                self._fault(running.request, error)

    def _say_cached(self, running: TargetRequest) -> None:
        if running.cached or running.offered:
            total = len(running.slot.tokens)
            self._link.send(Prefilled(running.request, running.epoch, running.cached, total, running.cached))

    def _verify(self, message: Verify) -> None:
        running = self._running.get(message.request)
        if running is None or message.epoch > running.epoch:
            self._link.send(Resync(message.request, message.epoch))
            return
        known = [answer for answer in running.answers if answer.round >= message.round]
        if message.epoch == running.epoch and known and known[0].round == message.round:
            for answer in known:
                self._link.send(answer)
            return
        if message.epoch < running.epoch:
            self._drop_stale(message)
            return
        running.offered = False  # a repeated VERIFY ends the wait for a prefill worker
        if not running.answers or (running.has_next and not running.autonomous):
            return  # a repeated message, or the round is under way
        if message.base_len != len(running.slot.tokens) or message.round != running.round + 1:
            running.halt()
            self._link.send(Resync(message.request, message.epoch))
            return
        if self.runner.makes(running):
            return  # the round is under way; its outcome follows
        running.on_verify(message)

    def _features(self, fed: Iterable[TargetRequest]) -> list[Message]:
        """Returns the features of the tokens that these requests fed, for heads in other processes."""
        features: list[Message] = []
        for running in fed:
            if running.listener is None or running.over:
                continue
            features += running.listener.take()
            if running.listener.fault:
                features.append(WorkerNote(self._link.name, running.listener.fault))
                running.listener = None
        return features

    def _answer(self, settled: VerifyResult) -> Message | None:
        running = settled.running
        if running.over:
            return None
        if isinstance(settled.verdict, OutriderError):
            self._fault(running.request, settled.verdict)
            return None
        if running.ended:
            running.forget(settled.verdict)
            return None
        return running.settled(settled.verdict, settled.work, settled.rows, self._peak_memory.bytes())


def _progress(readers: Iterable[TargetRequest]) -> list[Message]:
    """Returns the progress of long prompts."""
    return [
        Prefilled(reader.request, reader.epoch, reader.slot.fed, len(reader.slot.tokens))
        for reader in readers
        if not reader.over and len(reader.slot.tokens) > PREFILL
    ]
