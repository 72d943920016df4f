"""One forward over several texts: each verifies a chain or a tree, takes a plain step or reads a piece of its prompt.

`begin_forward` starts it on the device, `BatchForward.commit` waits for it. If all texts take plain steps, the next
forward may begin before this one is read, while its tokens are still on the device. A token is scored in the
same way however it was fed, so with coupled sampling a text depends neither on its chains nor on other requests.
`engine.residual` verifies chains that come with a q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx
import numpy as np

from outrider.engine.hidden_states import HiddenStatesCallback
from outrider.engine.kv_cache import CacheSlot, Feed, KVCache
from outrider.engine.residual import ResidualSampler
from outrider.engine.sampling import History, Sampler, SamplingMetadata, apply_penalties, best_tokens, compute_scores
from outrider.protocol.errors import InvalidRequest, ModelFault, OutriderError
from outrider.protocol.schema import IMPOSSIBLE_LOGPROB, Logprobs
from outrider.protocol.trees import SparseQ, accepted_path, chain_parents, node_depths, one_hot, token_paths, tree_fault

_MAX_REPLAYED_TOKENS = 8  # committed tokens a model with recurrent state may feed again before its next chain


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """`accepted` tokens of a chain or a tree are accepted; `bonus` is the target's own token after them.

    `logprobs`: of all these tokens, if the request wants them. `path`: the accepted nodes; None: the first ones.
    """

    accepted: int
    bonus: int
    logprobs: Logprobs | None = None
    path: tuple[int, ...] | None = None

    @property
    def nodes(self) -> Sequence[int]:
        """The accepted nodes, from the text down."""
        return range(self.accepted) if self.path is None else self.path


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """What one slot verifies: a chain (if empty, a plain step), and the `q` that it was drawn from, if it was.

    Without `q`, residual sampling takes the tokens as chosen with certainty. With `parents` they are a tree
    (`protocol.trees`).
    """

    slot: CacheSlot
    chain: tuple[int, ...] = ()
    q: SparseQ | None = None
    parents: tuple[int, ...] = ()

    @property
    def tree_parents(self) -> tuple[int, ...]:
        """The parents of the tokens as a tree: those of a chain follow one another."""
        return self.parents or chain_parents(len(self.chain))


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `count` tokens of a slot's prompt."""

    slot: CacheSlot
    count: int

    @property
    def num_logits(self) -> int:
        """The number of tokens that get logits: all of them, if the request asks for its prompt's log-probabilities."""
        return self.count if self.slot.sampler.params.prompt_logprobs is not None else 0


class RowLogprobs:
    """Log-probabilities of rows, [R, V]. Lazy."""

    def __init__(self, logits: mx.array, count: int) -> None:
        """`logits` [R, V] after penalties, bias and grammar; `count`: the number of likeliest tokens."""
        logits = logits.astype(mx.float32)
        self.pending, self._count = logits - mx.logsumexp(logits, axis=-1, keepdims=True), count

    def of(self, tokens: Sequence[int], rows: Sequence[int]) -> Logprobs:
        """Returns the log-probabilities of these rows' tokens and of the likeliest tokens. Waits for `pending`."""
        every = np.array(self.pending, copy=False)[rows]
        ids = np.asarray(tokens, np.int32)[:, None]
        if self._count:
            likeliest = np.stack([best_tokens(row, self._count) for row in every])
            ids = np.concatenate([ids, likeliest.astype(np.int32)], axis=1)
        return Logprobs(ids, np.maximum(np.take_along_axis(every, ids, 1), np.float32(IMPOSSIBLE_LOGPROB)))


class BatchForward:
    """A forward under way over texts of `kv_cache`. `rows`: the number of tokens that it feeds, of all texts."""

    def __init__(
        self,
        kv_cache: KVCache,
        inputs: Sequence[VerifyInput],
        logits: mx.array,
        positions: Sequence[int],
        rows: int,
        hidden: Sequence[tuple[mx.array, ...]],
    ) -> None:
        """`logits` [sum of chain lengths + 1, V]; the first row of input i chooses the token at `positions[i]`.

        `hidden[i]`: the hidden states of all tokens that input i feeds, for its listener, by reader; those of `chunks`
        follow.
        """
        self._kv_cache, self.inputs, self.rows = kv_cache, tuple(inputs), rows
        self._logits, self._positions, self._hidden = logits, positions, hidden
        self._row_starts = [0, *accumulate(len(input_.chain) + 1 for input_ in inputs)]
        self._index_of = {input_.slot: index for index, input_ in enumerate(inputs)}
        self.chosen: mx.array | None = None
        self._logprobs: dict[int, RowLogprobs] = {}
        self._prompt_logprobs: list[tuple[PrefillChunk, int, RowLogprobs]] = []

    @property
    def is_plain(self) -> bool:
        """True if every text takes a plain step, so that the next forward can begin before this one is read."""
        return bool(self.inputs) and not any(input_.chain for input_ in self.inputs)

    def token_of(self, slot: CacheSlot) -> mx.array:
        """Returns the token of a slot's plain step, int [1], possibly unread."""
        index = self._index_of[slot]
        return cast(mx.array, self.chosen)[index : index + 1]

    def read_token_of(self, slot: CacheSlot) -> int:
        """Returns the token of a slot's plain step. Waits for this forward, not for one that was begun after it."""
        return self._read()[self._index_of[slot]]

    def _read(self) -> list[int]:
        # Reads the whole array: a slice would wait for the next forward.
        return cast(list[int], cast(mx.array, self.chosen).tolist())

    def commit(self) -> list[VerifyOutput | OutriderError]:
        """Waits; commits accepted tokens to each slot and rolls back the rest. Returns each slot's output or error."""
        if self.chosen is None:
            mx.eval(self._kv_cache.state(), list(self._hidden), self._pending_logprobs())
        for chunk, start, rows in self._prompt_logprobs:
            predicted = chunk.slot.tokens[start + 1 : start + 1 + chunk.count]
            chunk.slot.prompt_logprobs[start] = rows.of(predicted, range(chunk.count))
        if self.chosen is None:
            return []
        choices = self._read()
        return [self._commit_output(index, input_, choices) for index, input_ in enumerate(self.inputs)]

    def choose(self, after: BatchForward | None) -> None:
        """Starts the choice of every row's token. Slots with samplers of one kind are scored together.

        Args:
            after: a forward whose tokens are fed but not yet committed, if any.
        """
        if any(input_.slot.sampler.constraint is not None for input_ in self.inputs):
            mx.async_eval(self._logits)  # type: ignore[no-untyped-call]  # meanwhile grammars compute allowed tokens
        self.chosen = self._choose_tokens(after)
        mx.async_eval(self.chosen, self._pending_logprobs(), self._hidden)  # type: ignore[no-untyped-call]

    def add_prompt_logprobs(self, chunks: Sequence[PrefillChunk], starts: Sequence[int], logits: mx.array) -> None:
        """Adds the log-probabilities of prompts. `starts`: where each chunk begins; `logits`: their rows."""
        first = 0
        for chunk, start in zip(chunks, starts, strict=True):
            count, end = chunk.slot.sampler.params.prompt_logprobs, first + chunk.num_logits
            if count is not None:
                self._prompt_logprobs.append((chunk, start, RowLogprobs(logits[first:end], count)))
            first = end

    def _pending_logprobs(self) -> list[mx.array]:
        return [rows.pending for rows in (*self._logprobs.values(), *(own for _, _, own in self._prompt_logprobs))]

    def _choose_tokens(self, after: BatchForward | None) -> mx.array:
        groups: dict[object, list[int]] = {}
        for index, input_ in enumerate(self.inputs):
            groups.setdefault(input_.slot.sampler.kind, []).append(index)
        parts = [self._choose_group(members, after) for members in groups.values()]
        if len(parts) == 1:
            return parts[0]
        order = [row for members in groups.values() for index in members for row in self._rows(index)]
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.take(mx.concatenate(parts), mx.array(back, mx.int32))

    def _rows(self, index: int) -> range:
        return range(self._row_starts[index], self._row_starts[index + 1])

    def _choose_group(self, members: Sequence[int], after: BatchForward | None) -> mx.array:
        rows = [row for index in members for row in self._rows(index)]
        all_rows = len(rows) == self._row_starts[-1]
        logits = self._logits if all_rows else mx.take(self._logits, mx.array(rows, mx.int32), axis=0)
        metadata = [self._metadata_of(index, after) for index in members]
        logits = apply_penalties(metadata, logits)
        self._prepare_logprobs(members, logits)
        if not self._kv_cache.is_lazy and logits.dtype == mx.float32:
            chosen = _choose_on_host(metadata, logits)
            if chosen is not None:
                return mx.array(chosen, mx.int32)
        return _argmax_tokens(compute_scores(metadata, logits))

    def _metadata_of(self, index: int, after: BatchForward | None) -> SamplingMetadata:
        input_ = self.inputs[index]
        histories = _make_histories(input_, after) if input_.slot.sampler.needs_history else None
        return SamplingMetadata(input_.slot.sampler, self._positions_of(index), histories)

    def _prepare_logprobs(self, members: Sequence[int], logits: mx.array) -> None:
        """Prepares the log-probabilities of requests that want them; `logits`: the members' rows."""
        start = 0
        for index in members:
            end, count = start + len(self._rows(index)), self.inputs[index].slot.sampler.params.logprobs
            if count is not None:
                self._logprobs[index] = RowLogprobs(logits[start:end], count)
            start = end

    def _positions_of(self, index: int) -> list[int]:
        first = self._positions[index]
        return [first, *(first + 1 + depth for depth in node_depths(self.inputs[index].tree_parents))]

    def _commit_output(self, index: int, input_: VerifyInput, choices: Sequence[int]) -> VerifyOutput | OutriderError:
        slot, chain = input_.slot, list(input_.chain)
        rows = self._rows(index)
        try:
            if chain and isinstance(slot.sampler, ResidualSampler):
                output = self._verify_residual(slot.sampler, input_, rows, self._metadata_of(index, None))
            else:
                output = _verify_coupled(slot.sampler, input_, choices[rows.start : rows.stop])
            nodes = output.nodes
            own = [0, *(node + 1 for node in nodes)]  # the rows of the accepted nodes
            new = [*(chain[node] for node in nodes), output.bonus]
            if slot.sampler.constraint is not None:
                slot.sampler.constraint.check([*slot.tokens, *new[:-1]])
            if index in self._logprobs:
                output = replace(output, logprobs=self._logprobs[index].of(new, own))
            trunk = slot.sequence.length - len(chain)
            slot.tokens += new
            if output.path is not None:
                slot.sequence.keep(trunk, [trunk + node for node in output.path])
            elif output.accepted < len(chain):  # else there is nothing to undo, and the next step may be under way
                slot.sequence.roll_back(len(slot.tokens) - 1)
            if slot.listener is not None and self._hidden[index]:
                kept = [_rows_of(own, rows, len(chain) + 1) for rows in self._hidden[index]]
                slot.listener(self._positions[index] - 1, *kept)
        except OutriderError as error:
            return error
        return output

    def _verify_residual(
        self, sampler: ResidualSampler, input_: VerifyInput, rows: range, metadata: SamplingMetadata
    ) -> VerifyOutput:
        if input_.parents:
            raise InvalidRequest("this request uses residual sampling, which can't verify a tree; expected a chain")
        q = one_hot(input_.chain) if input_.q is None else input_.q
        log_p, places = sampler.log_p(self._logits[rows.start : rows.stop], metadata.histories), metadata.positions
        if not (log_p.max(axis=-1) > -np.inf).all():
            raise ModelFault("the target's logits are NaN or infinite; this request can't continue")
        k = sampler.accepted(log_p[:-1], places[:-1], input_.chain, q)
        rejected = q.part(k, k + 1) if k < len(input_.chain) else None
        return VerifyOutput(k, sampler.resample(log_p[k], places[k], rejected))


def begin_forward(
    inputs: Sequence[VerifyInput], chunks: Sequence[PrefillChunk] = (), after: BatchForward | None = None
) -> BatchForward:
    """Starts one forward over these slots of one KV cache.

    Args:
        after: a forward of plain steps that is not read yet; every input is then the plain step after the one there.
    """
    parts: list[VerifyInput | PrefillChunk] = [*inputs, *chunks]
    hidden: list[tuple[mx.array, ...]] = [()] * len(parts)

    def receive(index: int, *rows: mx.array) -> None:
        hidden[index] = rows

    callbacks = [partial(receive, n) if part.slot.listener is not None else None for n, part in enumerate(parts)]
    feeds = [_make_feed(part, own, after) for part, own in zip(parts, callbacks, strict=True)]
    positions = [input_.slot.fed + feed.count - len(input_.chain) for input_, feed in zip(inputs, feeds, strict=False)]
    starts = [chunk.slot.fed for chunk in chunks]
    kv_cache = parts[0].slot.kv_cache
    logits = kv_cache.forward(feeds)
    first = sum(feed.num_logits for feed in feeds[: len(inputs)])
    forward = BatchForward(kv_cache, inputs, logits[:first], positions, sum(feed.count for feed in feeds), hidden)
    forward.add_prompt_logprobs(chunks, starts, logits[first:])
    for chunk, start, rows in zip(chunks, starts, hidden[len(inputs) :], strict=True):
        if chunk.slot.listener is not None and rows:
            chunk.slot.listener(start, *rows)
    if inputs:
        forward.choose(after)
    else:
        mx.async_eval(kv_cache.state(), hidden)  # type: ignore[no-untyped-call]
    return forward


def _rows_of(accepted: Sequence[int], hidden: mx.array, count: int) -> mx.array:
    """Returns the hidden states of these of the last `count` tokens; tokens that were fed again come before."""
    fed = hidden if hidden.shape[0] == count else hidden[-count:]  # a slice would wait for the next forward
    if accepted[-1] < len(accepted):  # the first ones
        return fed if len(accepted) == count else fed[: len(accepted)]
    return mx.take(fed, mx.array(list(accepted), mx.int32), axis=0)


def _make_feed(
    part: VerifyInput | PrefillChunk, callback: HiddenStatesCallback | None, after: BatchForward | None
) -> Feed:
    slot, sequence = part.slot, part.slot.sequence
    if isinstance(part, PrefillChunk):
        if sequence.has_free_marks:
            sequence.mark()
        return Feed(sequence, slot.tokens[slot.fed : slot.fed + part.count], part.num_logits, True, callback)
    if len(slot.unfed) > _MAX_REPLAYED_TOKENS:
        slot.feed_all_but_last()
    if part.chain or after is not None or sequence.has_free_marks:
        sequence.mark()
    if part.parents:
        _check_tree(part)
    # A drafter may have tokens that the target lacks; they are never accepted.
    known = [token if token < slot.sampler.vocab_size else 0 for token in part.chain]
    tokens = slot.unfed + known if after is None else after.token_of(slot)
    return Feed(sequence, tokens, len(part.chain) + 1, False, callback, part.parents, slot.all_cores)


def _check_tree(input_: VerifyInput) -> None:
    """Raises InvalidRequest if the parents are invalid, or the target verifies chains only."""
    if not input_.slot.kv_cache.trees:
        raise InvalidRequest("this target can't verify a tree of drafts; expected a chain")
    if why := tree_fault(input_.chain, input_.parents):
        raise InvalidRequest(why)


def _verify_coupled(sampler: Sampler, input_: VerifyInput, choices: Sequence[int]) -> VerifyOutput:
    if input_.q is not None and input_.chain and sampler.params.temp > 0:
        raise InvalidRequest("this request uses coupled sampling, and its chain has a q; expected one without q")
    if min(choices) < 0:
        raise ModelFault("the target's logits are NaN or infinite; this request can't continue")
    path = accepted_path(input_.chain, input_.tree_parents, choices)
    bonus = choices[path[-1] + 1 if path else 0]
    return VerifyOutput(len(path), bonus, path=None if path == tuple(range(len(path))) else path)


def _choose_on_host(metadata: Sequence[SamplingMetadata], logits: mx.array) -> list[int] | None:
    """Chooses by numpy: on a CPU MLX's operations over a vocabulary take as long as model layers."""
    rows, start, tokens = np.array(logits, copy=False), 0, []
    for own in metadata:
        end = start + len(own.positions)
        chosen = own.sampler.choose(rows[start:end], own.positions)
        if chosen is None:
            return None
        tokens += chosen
        start = end
    return tokens


def _argmax_tokens(scores: mx.array) -> mx.array:
    """Returns the best token of each row, [N]; -1 if its score is NaN or -inf."""
    best = mx.argmax(scores, axis=-1)
    score = mx.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    return mx.where(score > -mx.inf, best.astype(mx.int32), -1)


def _make_histories(input_: VerifyInput, after: BatchForward | None) -> list[History]:
    """Returns the history of each row, for penalties and grammar: committed text and the chain before its choice."""
    reach = input_.slot.sampler.reach
    text = input_.slot.tokens[-reach:]
    if after is not None and input_.slot.sampler.constraint is not None:
        return [[*text, after.read_token_of(input_.slot)]]
    if after is not None:
        return [mx.concatenate([mx.array(text, mx.int32), after.token_of(input_.slot).astype(mx.int32)])]
    return [[*text, *down][-reach:] for down in ((), *token_paths(input_.chain, input_.tree_parents))]
