"""The target worker's loop: receives messages about requests, sends outcomes, runs one forward over all requests.

Owns a `TargetRequest` for each request. Answers a repeated VERIFY with its latest outcomes, drops stale messages,
sends RESYNC if the committed lengths disagree, and closes requests that have had no message for a long time.
The prompt cache saves the reading of prompts, as do the keys and values of prefill workers. Knows nothing of drafters
in other processes, or of text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import Head
from outrider.engine import memory
from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS, CacheSlot, FlatKVCache, KVCache, KVLayout
from outrider.engine.load_checks import measure_sequence_cost, open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import MIN_PREFIX_TOKENS, PromptCache, common_prefix_length
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.messages import (
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
from outrider.protocol.stats import KvCost
from outrider.protocol.worker_link import WorkerLink, WorkerLoop
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.model_runner import ModelRunner, VerifyResult
from outrider.target_worker.ranks import FORWARDS_PER_CACHE_CLEAR, RankLeader
from outrider.target_worker.target_request import AwaitedPrefix, FeatureListener, TargetRequest

log = logging.getLogger(__name__)

# How long requests that can continue wait for messages about others, which then join the same forward.
JOIN_WAIT_MS = 1.0


def _find_reader(running: TargetRequest, others: Iterable[TargetRequest]) -> AwaitedPrefix | None:
    """Returns the request that will read the longest part of the beginning of this one's prompt, which waits for it, so
    that a system prompt is read once for any number of requests."""
    wanted, best = np.array(running.slot.tokens[:-1], np.int32), None
    for other in others:
        if other.unread and other.slot.sequence.exact:
            shared = common_prefix_length(np.array(other.slot.tokens[:-1], np.int32), wanted)
            if shared >= max(MIN_PREFIX_TOKENS, other.slot.fed + 1) and (best is None or shared > best.tokens):
                best = AwaitedPrefix(other, shared)
    return best


class TargetWorker(WorkerLoop[TargetRequest]):
    """Serves requests from `link` with `model` until SHUTDOWN.

    `drafters` are in this process; `remote_head` is in another one, and gets features. For a sharded model, `leader`
    leads the other ranks, and `kv_cache` is shared by all.
    """

    _link: WorkerLink

    def __init__(
        self,
        link: WorkerLink,
        model: LoadedModel,
        drafters: InProcessDrafters | None = None,
        kv_cache: KVCache | None = None,
        leader: RankLeader | None = None,
        remote_head: Head | None = None,
    ) -> None:
        super().__init__(link, lambda: self._cache.use, self._limit_caches)
        self._model = model
        self._leader = leader
        self._kv_cache = kv_cache or open_kv_cache(model)
        self.runner = ModelRunner()
        self._drafters = drafters or InProcessDrafters({})
        self._remote_head = remote_head
        self._drafters.attach_heads(model, self._kv_cache, remote_head)
        self._kv_layout = KVLayout.of(model.model, model.cpu) if isinstance(self._kv_cache, FlatKVCache) else None
        self._cache = PromptCache(measure_sequence_cost(self._kv_cache))
        self._compiler = GrammarCompiler(model.folder)
        self._peak_memory = memory.PeakMemory()
        self._forwards = 0
        self._ending = False

    @property
    def takes_kv(self) -> bool:
        """True if a prefill worker can read prompts: no head needs the target's hidden states of them."""
        return self._kv_layout is not None and not self._drafters.reads_hidden_states

    @property
    def kv(self) -> KvCost:
        """The memory of a request's text, including in-process drafters."""
        return self._cache.cost + self._drafters.cost

    @property
    def verifies_trees(self) -> bool:
        """True if it verifies trees of drafts."""
        return self._kv_cache.trees

    def turn(self) -> bool:
        """Handles waiting messages, then begins a forward or ends the one under way. Returns False on SHUTDOWN."""
        self._handle_messages(wait=not self._has_work)
        self._wait_for_others()
        if self._ending:
            return False
        self._resume_waiting()
        self._link.expect(self.runner.expected_ms(self._running.values()))
        settled, readers = self.runner.advance(tuple(self._running.values()))
        self._handle_messages(wait=False)  # chains prepared meanwhile decide how requests continue
        answers = [answer for result in settled if (answer := self._make_answer(result)) is not None]
        features = self._take_features([*(result.running for result in settled), *readers])
        messages = [*features, *answers, *_progress_messages(readers)]
        if messages:
            self._link.send(*messages)
        for reader in readers:
            if not (reader.slot.sequence.exact or reader.unread or reader.is_closed):
                self._save(reader)  # state that can't be shortened, for requests with the same prompt
        self._forwards += 1
        if self._forwards % FORWARDS_PER_CACHE_CLEAR == 0:
            mx.clear_cache()
        return not self._ending

    @property
    def _has_work(self) -> bool:
        running = self._running.values()
        return self.runner.is_busy or any(r.has_next or r.can_read or r.can_resume for r in running)

    def _handle_messages(self, wait: bool) -> None:
        message = self._link.receive(wait=wait)
        while message is not None:
            self._handle(message)
            message = self._link.receive(wait=wait and not self._has_work and not self._ending)

    def _wait_for_others(self) -> None:
        """Waits a moment for messages with which other requests could join the next forward."""
        while not self._ending and not self.runner.is_busy and self._has_work:
            since_ns = clock.now() - int(JOIN_WAIT_MS * clock.MILLISECOND_NS)
            awaited = [r for r in self._running.values() if r.answers and not r.is_closed and not r.has_next]
            if not any(r.answers[-1].work.ended_ns > since_ns for r in awaited):
                return
            self._link.poll(JOIN_WAIT_MS)
            self._handle_messages(wait=False)

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
                    running.halting = True
                case Prepare() | PromptKv() | Halt():
                    pass  # the request has ended, or begun again
                case Shutdown():
                    self._ending = True
                case _:
                    super()._handle(message)
        except OutriderError as error:
            self._fail_request(message, error)

    def _fail_request(self, about: Message | TargetRequest, error: OutriderError) -> None:
        """Ends the request that `about` names; if a rank was lost, ends the worker instead."""
        if self._leader is not None:
            self._leader.check_ranks()
        running = self._running.get(getattr(about, "request", ""))
        self._fail(about, error, running.round + 1 if running is not None else None)

    def _open(self, message: Open) -> None:
        known = self._running.get(message.request)
        if known is not None and message.epoch <= known.epoch:
            self._drop_stale(message)
            return
        self._close(message.request)
        self._close_silent(lambda running: running.waits_since_ns)
        if not self._running:
            self._peak_memory.restart()
        tokens = message.tokens.tolist()
        sampling = message.sampling
        if message.generated:
            sampling = replace(sampling, prompt_logprobs=None)  # they were sent with the first token
        slot = CacheSlot(self._model, self._kv_cache, tokens, sampling, self._compiler.constraint_of(message))
        listener = None
        if self._remote_head is not None and message.features:
            listener = FeatureListener(message.request, message.epoch, self._remote_head.reach)
        sessions = self._drafters.make_session_openers(
            slot,
            message.sampling,
            lambda: self._compiler.constraint_of(message),
            listener.on_features if listener is not None else None,
        )
        now_ns = clock.now()
        running = TargetRequest(slot, message, sessions, opened_ns=now_ns, heard_ns=now_ns, listener=listener)
        running.on_verify(Verify(message.request, message.epoch, message.round, len(tokens)))  # of an empty chain
        others = tuple(self._running.values())
        self._running[message.request] = running
        if not running.wants_prompt_logprobs:  # else it reads all of its prompt
            running.awaits = _find_reader(running, others) if self._cache.is_on else None
            if running.awaits is None:
                self._restore_cached(running)
        self._cache.enter(slot, min(message.prompt_len + sampling.max_tokens, self._model.context_length))
        running.offered = message.offered and self._kv_layout is not None and not running.wants_prompt_logprobs
        if running.awaits is None:
            self._report_cached(running)
        self._report()

    def _import_kv(self, running: TargetRequest, message: PromptKv) -> None:
        """Imports a prefill worker's keys and values. If they don't fit, the target reads the rest of the prompt."""
        if running.epoch != message.epoch or not running.offered:
            return
        running.heard_ns = clock.now()
        try:
            with wrap_model_errors("receiving the prompt's keys and values"):
                running.offered = self._append_kv(running, message)
        except OutriderError as error:
            log.warning("%s; the target reads the prompt from token %d on", error, running.slot.fed)
            running.offered = False
        for progress in _progress_messages([running]):
            self._link.send(progress)

    def _append_kv(self, running: TargetRequest, message: PromptKv) -> bool:
        """Appends the part that the text lacks. Returns False after a gap."""
        skip = running.slot.fed - message.start
        count = min(message.count - skip, running.unread)
        if skip >= 0 and count > 0 and self._kv_layout is not None:
            layers = self._kv_layout.unpack(message.data, message.count)
            own = tuple((k[..., skip : skip + count, :], v[..., skip : skip + count, :]) for k, v in layers)
            cast(FlatKVCache, self._kv_cache).extend(running.slot.sequence, own, count)
        return skip >= 0

    def _restore_cached(self, running: TargetRequest) -> None:
        """Copies the longest cached prefix of the prompt. Raises OutriderError if that fails."""
        running.awaits = None
        with wrap_model_errors("copying from the prompt cache"):
            if (start := self._cache.find(running.slot.tokens)) is not None:
                running.slot.begin(start)
                running.cached = running.slot.fed

    def _save(self, running: TargetRequest) -> None:
        self._cache.store(running.slot.tokens[: running.slot.fed], running.slot.save)

    def _release(self, running: TargetRequest, discard: bool) -> None:
        running.close(discard)
        self._cache.leave(running.slot)
        if not discard:
            self._save(running)
        running.slot.close()
        self._peak_memory.count_ended_text()

    def _limit_memory(self, message: KvMemory) -> None:
        memory.set_limits(self._model.weight_bytes + self._drafters.weight_bytes, message.limit)
        if self._leader is not None:
            self._leader.broadcast(message)
        super()._limit_memory(message)

    def _limit_caches(self, limit: int) -> None:
        """Divides the limit of the prompt caches: in-process drafters get shares by what a text takes in them."""
        self._cache.set_limit(self._drafters.divide_memory(limit, self._model.context_length, self.kv))

    def _resume_waiting(self) -> None:
        """Continues requests that waited until another one had read their common prefix."""
        for running in [r for r in self._running.values() if r.can_resume]:
            try:
                self._restore_cached(running)
                self._report_cached(running)
                self._report()
            except OutriderError as error:
                self._fail_request(running, error)

    def _report_cached(self, running: TargetRequest) -> None:
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
        if running.awaits is not None and clock.now() - running.awaits.reader.heard_ns > clock.OUTCOME_TIMEOUT_NS:
            running.awaits.reader.offered = False  # its own VERIFY or CLOSE must have been lost
        if not running.answers or (running.has_next and not running.autonomous):
            return  # a repeated message, or the round is under way
        last = running.answers[-1]
        if (message.round, message.base_len) != (last.round + 1, last.base_len + last.accepted + 1):
            running.halting = True
            self._link.send(Resync(message.request, message.epoch))
            return
        if self.runner.is_verifying(running) or message.base_len < len(running.slot.tokens):
            return  # the round is under way or has just ended; its outcome follows
        running.on_verify(message)

    def _take_features(self, fed: Iterable[TargetRequest]) -> list[Message]:
        """Returns the features of the tokens that these requests fed, for heads in other processes."""
        features: list[Message] = []
        for running in fed:
            if running.listener is None or running.is_closed:
                continue
            features += running.listener.take()
            if running.listener.fault:
                features.append(WorkerNote(running.listener.fault))
                running.listener = None
        return features

    def _make_answer(self, settled: VerifyResult) -> Message | None:
        running = settled.running
        if running.is_closed:
            return None
        if running.ended:
            running.forget(settled.output)
            return None
        if isinstance(settled.output, OutriderError):
            self._fail_request(running, settled.output)
            return None
        peak, under_way = self._peak_memory.bytes(), self.runner.is_verifying(running)
        return running.make_outcome(settled.output, settled.work, settled.rows, peak, under_way)


def _progress_messages(readers: Iterable[TargetRequest]) -> list[Message]:
    """Returns the progress of long prompts."""
    return [
        Prefilled(reader.request, reader.epoch, reader.slot.fed, len(reader.slot.tokens))
        for reader in readers
        if not reader.is_closed and len(reader.slot.tokens) > PREFILL_CHUNK_TOKENS
    ]
