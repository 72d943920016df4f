"""Texts that the target has said, and what each drafter would have said at each place of them.

The head reads the target's rows of all that was committed: features as fresh as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.bench.tree_rounds import DEPTH, Text, thoughts
from outrider.drafting.beside import WIDTH, Place, Said
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.line import Line
from outrider.drafting.heads.load import load as load_head
from outrider.drafting.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel, load
from outrider.engine.taps import Taps
from outrider.orchestrator.pair.heads import kind_of
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.sampling import SamplingParams


class Reader:
    """The embedded pair and a head for its target, whose folder is `head`, in this process."""

    def __init__(self, head: str) -> None:
        self._model = load(str(EMBEDDED_TARGET))
        self._draft = MlxDrafter.load(str(EMBEDDED_DRAFT), lambda stage: None)
        self.name = kind_of(head, EMBEDDED_TARGET) or "head"
        self._head = load_head(self.name, head, self._model, lambda stage: None)

    def read(self, prompt: Sequence[int], rest: Sequence[int], sampling: SamplingParams) -> Text:
        """The text that goes on from `prompt` by `rest`, which the target said with this sampling."""
        by_model = thoughts(prompt, rest, sampling, self._draft)
        by_head = head_thoughts(self._model, self._head, [*prompt, *rest], len(prompt), sampling)
        return Text(tuple(prompt), tuple(rest), {DRAFT_MODEL: by_model, self.name: by_head})


def head_thoughts(
    model: LoadedModel, own: HeadDrafter, tokens: Sequence[int], begin: int, sampling: SamplingParams
) -> list[Said]:
    """What the head says and thinks behind each place of a text from `begin` on."""
    rows: list[mx.array] = []
    taps = Taps(model.model, own.head.points, own.head.fuse)
    mx.eval(taps.forward(lambda: model.model(mx.array([tokens]))[0], [(len(tokens), rows.append)]), rows)
    follower, heard, found = own.follow(sampling), 0, []
    for end in range(begin, len(tokens) - DEPTH):
        follower.hear(heard, rows[0][heard : end - 1])
        line, heard = Line(follower, tokens[:end], WIDTH), end - 1
        (one,) = own.continuations([line], [DEPTH])
        found.append(Said(one.chain, [Place.of(*told) for told in zip(one.chain, line.candidates, strict=True)]))
    follower.close()
    return found
