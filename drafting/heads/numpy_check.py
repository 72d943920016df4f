"""May numpy make a head's forwards? Tried at load: pairs of ragged texts and a rollback, against MLX's forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.head import Head, StepHead
from outrider.drafting.heads.numpy_head import NumpyHead, numpy_head
from outrider.drafting.heads.pairs import PairFeed, Pairs
from outrider.engine.loading import LoadedModel
from outrider.protocol.errors import ModelError
from outrider.protocol.guard import first_line, named_errors

log = logging.getLogger(__name__)

_COUNTS = ((9, 1, 4), (4, 2, 5))  # pairs of three texts, in two forwards
_BACK = 3
_NEAR = 1e-3  # of the largest


def agrees(head: StepHead, numpy: NumpyHead, target: LoadedModel) -> bool:
    """Whether pairs of no meaning get the vectors and logits that MLX gives them."""
    draws, ways = np.random.default_rng(0), (Pairs(head), Pairs(head, numpy))
    texts = [[way.open() for _ in _COUNTS[0]] for way in ways]
    for counts in _COUNTS:
        rows = draws.standard_normal((sum(counts), head.points.count * int(target.config["hidden_size"])))
        features, tokens = head.fuse(mx.array(rows, mx.float32)), mx.array(draws.integers(0, 9, sum(counts)), mx.int32)
        begins = np.cumsum((0, *counts)).tolist()
        own, found = (
            way.hidden(
                [
                    PairFeed(text, tokens[begin : begin + count], features[begin : begin + count])
                    for text, begin, count in zip(of_way, begins, counts, strict=False)
                ]
            )
            for way, of_way in zip(ways, texts, strict=True)
        )
        same = (own, found), (head.logits(own), numpy.logits(found)), (head.onward(own), numpy.onward(found))
        if not all(alike(*both) for both in same):
            return False
        for of_way in texts:
            of_way[0].roll_back(counts[0] - _BACK)
    return True


def host_of(
    head: Head, target: LoadedModel, trial: Callable[[StepHead, NumpyHead, LoadedModel], bool] = agrees
) -> NumpyHead | None:
    """What makes its forwards of few pairs; None: MLX does. `trial`: whether it does so rightly."""
    if not isinstance(head, StepHead):
        return None
    try:
        with named_errors("numpy's forwards of the head", logging.INFO):
            found = numpy_head(head, target)
            if trial(head, found, target):
                return found
        reason = "its vectors differ"
    except ModelError as error:
        reason = first_line(error)
    log.info("numpy's forwards are not for this head: %s", reason)
    return None


def alike(own: mx.array, found: mx.array) -> bool:
    largest = cast(float, mx.abs(mx.where(mx.isinf(own), 0.0, own)).max().item())
    return bool(mx.allclose(own, found, rtol=0.0, atol=_NEAR * max(largest, 1.0)).item())
