"""Loads a head as a drafter in the target's process, and checks it. A new kind of head is its file and a line here.

- `agreement`: whether the head gets the inputs that it was trained on. Formats pair rows with tokens and count layers
  in different ways; a mistake raises no error and only lowers the acceptance rate. So the head is fed a text of the
  target as configured and in a few other ways, and its predictions of the target's next token are compared.
- `agrees`: whether numpy may compute the head's forwards, by a comparison of ragged texts, a rollback and token trees
  with MLX.
- `step_cost`: the time of a drafted token over that of a target step, in the target's process, both in turns. The
  minimum of a few turns counts, which excludes most of the other load of the machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from outrider.drafters.heads import dflash, eagle3, early_exit, mtp, redrafter
from outrider.drafters.heads.checkpoint import stranger
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.early_exit import trial_text
from outrider.drafters.heads.head import Head, StepHead
from outrider.drafters.heads.pair_kv_cache import NumpyHead, PairKVCache
from outrider.drafters.heads.proposers import ChainState, CheckableProposer, proposer_of, wrong_proposers_of
from outrider.engine.flat import FlatSequence, NodeSegment, Segment
from outrider.engine.hidden_states import HiddenStatePoints, HiddenStates, backbone_of, embedding
from outrider.engine.load_checks import open_slots
from outrider.engine.loading import LoadedModel, find
from outrider.engine.numpy_net import ends_of
from outrider.engine.verify import verify
from outrider.protocol.digest import digest
from outrider.protocol.errors import CannotDraft, ModelError, OutriderError, first_line, named_errors
from outrider.protocol.heads import OF_TARGET
from outrider.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)


def _eagle3(folder: Path, target: LoadedModel) -> Head:
    table = embedding(backbone_of(target.model)[0])
    return eagle3.read(folder, target.config, target.vocab_size, lambda tokens: table(tokens))


_READ: dict[str, Callable[[Path, LoadedModel], Head]] = {
    "dflash": dflash.read,
    "eagle3": _eagle3,
    "mtp": mtp.read,
    "redrafter": redrafter.read,
}


def read(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None]) -> Head:
    """Returns the head of this kind at a path or Hugging Face id, for `model`.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    with _named(f"loading the head {path}"):
        folder = find(path, progress)
        progress(f"loading {path}")
        return _READ[kind](folder, model)


def load(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None], alone: bool = True) -> HeadDrafter:
    """Returns the same as a drafter; its `note` warns if head and target do not seem to fit.

    `alone`: the model is whole in this process. With several ranks a head is not tried, because a forward needs all
    ranks, and one that needs the target's output layer is refused, because each rank has a part of it.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    if kind in ("dflash", *OF_TARGET) and not alone:
        raise CannotDraft(f"{kind} needs the target's whole output layer; use it without shards, or use eagle3")
    if kind == "early-exit":
        with _named(f"loading the head {path}"):
            return early_exit.load(find(path, progress), model)
    head, doubt, agrees, numpy = read(kind, path, model, progress), "", None, None
    if alone:
        numpy = host_of(head, model)
        progress("testing the head with the target")
        with _named(f"trying the head {path}"):
            trial = agreement(head, model)
            doubts = filter(None, (stranger(find(path, progress), model.folder), trial.doubt))
            doubt, agrees = "; ".join(doubts), trial.own
    if doubt:
        log.warning("%s", doubt)
    return HeadDrafter(head, model.vocab_size, doubt, proposer_of(head, numpy), agrees)


def features_of(head: Head, folder: Path, target: Path) -> str:
    """Returns the source of the features: the head, the target and the taps, which must be equal on both sides."""
    points = head.points
    taps = [*points.layers, *["before"] * points.before_norm, *["after"] * points.after_norm]
    return f"head {digest(folder)} at {','.join(map(str, taps))} of {digest(target)}"


@contextmanager
def _named(action: str) -> Iterator[None]:
    """Converts any error into CannotDraft."""
    try:
        with named_errors(action):
            yield
    except CannotDraft:
        raise
    except OutriderError as error:
        raise CannotDraft(str(error)) from error


_LEAST = 0.1  # a head of this target agrees far more often, and chance is far less
_CLEARLY = 0.1


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the head predicts the target's next token: as configured, and fed in other ways, by their names."""

    own: float
    others: dict[str, float]

    @property
    def doubt(self) -> str:
        """A warning that head and target do not fit, or an empty text."""
        best = max(self.others, key=self.others.__getitem__, default="")
        if best and self.others[best] > self.own + _CLEARLY:
            return (
                f"the head agrees with the target on {self.own:.0%} of the tokens of a trial, and on"
                f" {self.others[best]:.0%} with {best}: its config.json may count layers differently; few drafts will"
                " be accepted"
            )
        if self.own < _LEAST:
            return (
                f"the head agrees with the target on {self.own:.0%} of the tokens of a trial; expected one that was"
                " trained for this target: few drafts will be accepted"
            )
        return ""


def agreement(head: Head, model: LoadedModel) -> Agreement:
    """Generates a text with the target and lets the head predict it."""
    text = trial_text(model)
    own = _share(head, proposer_of(head), model, text)
    others = {f"tokens {_away(by)}": _share(head, proposer_of(head), model, text, tokens=by) for by in (-1, 1)}
    others |= {name: _share(head, proposer, model, text) for name, proposer in wrong_proposers_of(head)}
    for name, points in _other_points(head.points):
        try:
            others[name] = _share(head, proposer_of(head), model, text, points)
        except ModelError:  # there is no such layer
            continue
    return Agreement(own, others)


def _other_points(points: HiddenStatePoints) -> Iterator[tuple[str, HiddenStatePoints]]:
    for by in (-1, 1) if points.layers else ():
        yield f"layers {_away(by)}", replace(points, layers=tuple(number + by for number in points.layers))
    if points.before_norm != points.after_norm:
        other = replace(points, before_norm=points.after_norm, after_norm=points.before_norm)
        yield "rows from the other side of the norm", other


def _away(by: int) -> str:
    return "one further on" if by > 0 else "one further back"


def _share(
    head: Head,
    proposer: CheckableProposer,
    model: LoadedModel,
    text: list[int],
    points: HiddenStatePoints | None = None,
    tokens: int = 0,
) -> float:
    """Returns how often the head is right with rows from these points, and with the tokens shifted by `tokens`."""
    rows: list[mx.array] = []
    logits = HiddenStates(model.model, points or head.points, head.fuse).forward(
        lambda: model.model(mx.array([text]))[0], [(len(text), rows.append)]
    )
    begin, end = 0, len(text) - 1 - max(tokens, 0)
    following = slice(begin + 1 + tokens, end + 1 + tokens)
    predicted = proposer.predict(mx.array(text[following], mx.int32), rows[0][begin:end])
    return cast(float, (predicted == mx.argmax(logits[following], axis=-1)).mean().item())


_COUNTS = ((9, 1, 4), (4, 2, 5))  # pairs of three texts, in two forwards
_BACK = 3
_PARENTS = (-1, 0, -1, 0, 2)  # of the nodes of a tree after each text
_NODES = ((0, 2), (1, 3, 4))  # those of two forwards
_KEPT = (0, 3)  # a branch that becomes final
_NEAR = 1e-3  # of the largest


def agrees(head: StepHead, numpy: NumpyHead, target: LoadedModel) -> bool:
    """Whether numpy and MLX give the same vectors and logits for random pairs, of texts and of token trees."""
    draws, caches = np.random.default_rng(0), (PairKVCache(head), PairKVCache(head, numpy))
    texts = [[cache.open() for _ in _COUNTS[0]] for cache in caches]

    def alike_after(counts: Sequence[int], segment: Callable[[FlatSequence, int], Segment]) -> bool:
        """Feeds so many pairs to each text; returns whether the results are the same."""
        rows = draws.standard_normal((sum(counts), head.points.count * int(target.config["hidden_size"])))
        features, tokens = head.fuse(mx.array(rows, mx.float32)), draws.integers(0, 9, sum(counts))
        vectors = [
            cache.vectors(tokens, features, [segment(text, n) for text, n in zip(own, counts, strict=True)])
            for cache, own in zip(caches, texts, strict=True)
        ]
        expected, actual = (mx.array(own) for own in vectors)
        logits, onward = (head.logits(expected), numpy.logits(actual)), (head.onward(expected), numpy.onward(actual))
        return all(alike(*pair) for pair in ((expected, actual), logits, onward))

    def next_pairs(text: FlatSequence, count: int) -> Segment:
        text.length += count
        return Segment(text.row, text.length - count, count)

    def nodes(own: Sequence[int], text: FlatSequence, count: int) -> Segment:
        start, rows = text.length, np.array(own, np.int32)
        whole = Segment(text.row, start, len(_PARENTS), parents=_PARENTS)
        places = np.concatenate([np.arange(start, dtype=np.int32), whole.positions])
        seen = whole.seen(whole.end, None)[rows]
        return NodeSegment(text.row, start, count, places=places, visible=seen, columns=rows + np.int32(start))

    for counts in _COUNTS:
        if not alike_after(counts, next_pairs):
            return False
        for own in texts:
            own[0].roll_back(counts[0] - _BACK)
    for chosen in _NODES:
        if not alike_after([len(chosen)] * len(texts[0]), partial(nodes, chosen)):
            return False
    for text in (text for own in texts for text in own):
        text.keep(text.length, [text.length + node for node in _KEPT])
    return alike_after([1] * len(texts[0]), next_pairs)


def host_of(head: Head, target: LoadedModel) -> NumpyHead | None:
    """Returns the head's forwards of few pairs by numpy, checked against MLX; None: MLX computes them."""
    if not isinstance(head, StepHead):
        return None
    try:
        with named_errors("numpy's forwards of the head", logging.INFO):
            numpy_head = _numpy_head(head, target)
            if agrees(head, numpy_head, target):
                return numpy_head
        reason = "its vectors differ"
    except ModelError as error:
        reason = first_line(error)
    log.info("numpy is not used for this head: %s", reason)
    return None


def _numpy_head(head: Head, target: LoadedModel) -> NumpyHead:
    """Returns the head's weights, laid out for the host.

    Raises:
        ModelError: numpy does not support the target or such a head.
    """
    if target.number_format != "float32":
        raise ModelError(f"numpy supports heads of a target in float32, not in {target.number_format}")
    ends = ends_of(target)
    if not isinstance(head, mtp.Mtp | eagle3.Eagle3):
        raise ModelError(f"numpy supports heads of kind mtp and eagle3; this is a {type(head).__name__}")
    try:
        return head.on_host(ends)
    except (AttributeError, TypeError, KeyError) as error:
        raise ModelError(f"numpy does not support this head: {error}") from error


def alike(expected: mx.array, actual: mx.array) -> bool:
    """Whether two arrays are equal up to the rounding of float32."""
    largest = cast(float, mx.abs(mx.where(mx.isinf(expected), 0.0, expected)).max().item())
    return bool(mx.allclose(expected, actual, rtol=0.0, atol=_NEAR * max(largest, 1.0)).item())


DEPTH = 4  # the default K: the cost of a block is that of all its tokens
_PROMPT, _TURNS = 16, 6


def step_cost(
    drafter: HeadDrafter, target: LoadedModel, seconds: Callable[[], float] = time.perf_counter
) -> float | None:
    """Returns the cost of a drafted token in target steps; None: it drafts nothing. Random rows take the same time."""
    draws, sampling = np.random.default_rng(0), SamplingParams(temp=1.0, seed=1)
    tokens = draws.integers(0, min(target.vocab_size, 9), _PROMPT).tolist()
    slot, follower = open_slots(target, [tokens], [sampling])[0], drafter.follow(sampling)
    width, read_len = drafter.head.points.count * int(target.config["hidden_size"]), 0
    steps, chains = list[float](), list[float]()
    try:
        for _ in range(_TURNS):
            began = seconds()
            tokens.append(verify(slot).bonus)
            verified = seconds()
            rows = mx.array(draws.standard_normal((len(tokens) - 1 - read_len, width)), mx.float32)
            follower.add_features(read_len, drafter.head.fuse(rows))
            read_len = len(tokens) - 1
            (continuation,) = drafter.continuations([ChainState(follower, tokens)], [DEPTH])
            if not continuation.chain:
                return None
            chains.append((seconds() - verified) / len(continuation.chain))
            steps.append(verified - began)
    finally:
        follower.close()
        slot.close()
    return min(chains[1:]) / max(min(steps[1:]), 1e-9)
