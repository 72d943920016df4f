"""What each drafter could bring one request on this machine at most, by the target's cost of rows and by its drafting.

    OPENBLAS_NUM_THREADS=1 python -m outrider.bench.bound                 # draft model and mtp head, T = 0.8
    OPENBLAS_NUM_THREADS=1 python -m outrider.bench.bound --today 1.5     # and what 1.15 times the best of today is

Texts are the target's own, odds are learned from three others, trees are the product's. Measured are the tokens of a
verify, c(M) and a token of each drafter, these by processor time, so that others' work disturbs little. Supposed:
outcomes, messages and the text take no time, and beside the draft worker nobody slows the target. `ahead`: the draft
worker's part is always hidden, a head's, in the target's process, never. `free`: nobody's drafting takes time. Each
line is the best of its chains' depths and numbers of nodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx

from outrider.bench import forwards
from outrider.bench.embedded import mixed_tokens
from outrider.bench.tree_rounds import DEPTH, Text, Way, thoughts
from outrider.bench.trees import through
from outrider.drafting.beside import WIDTH, Place
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.line import Line
from outrider.drafting.heads.load import load as load_head
from outrider.drafting.mlx import MlxDrafter
from outrider.drafting.work_ahead import Said
from outrider.engine.loading import LoadedModel, load
from outrider.engine.slots import open_slots
from outrider.engine.taps import Taps
from outrider.engine.verify import verify
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pair.heads import kind_of
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_HEADS, EMBEDDED_TARGET
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.profile import Latency
from outrider.protocol.sampling import SamplingParams

HEAD, WARM_UP, COLUMNS = "head", 3, 192
NODES = (1, 2, 3, 4, 6, 8, 12)
DEPTHS = (1, 2, 3, 4, 6)
GOAL = 1.15
WAYS = (
    Way("draft model, chain"),
    Way("draft model, tree", beside=True),
    Way("draft model, copies", beside=True, copies=True),
    Way("head, chain", (HEAD,)),
    Way("head, tree", (HEAD,), beside=True),
    Way("head, copies", (HEAD,), beside=True, copies=True),
    Way("both", (DRAFT_MODEL, HEAD), beside=True),
    Way("both, copies", (DRAFT_MODEL, HEAD), beside=True, copies=True),
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A way at its best: over plain decoding, tokens a verify, rows, and how deep its chains are."""

    gain: float
    tokens: float
    rows: float
    depth: int


class Timed:
    """How long each token of a drafter's chains took, milliseconds."""

    def __init__(self) -> None:
        self._all: list[float] = []

    def add(self, begun: float, tokens: int) -> None:
        self._all.append(1000 * (time.process_time() - begun) / tokens)

    @property
    def median(self) -> float:
        return statistics.median(self._all)


def head_thoughts(
    model: LoadedModel, own: HeadDrafter, tokens: Sequence[int], begin: int, sampling: SamplingParams, timed: Timed
) -> list[Said]:
    """What the head says and thinks behind each place of a text from `begin` on."""
    rows: list[mx.array] = []
    taps = Taps(model.model, own.head.points, own.head.fuse)
    mx.eval(taps.forward(lambda: model.model(mx.array([tokens]))[0], [(len(tokens), rows.append)]), rows)
    follower, heard, found = own.follow(sampling), 0, []
    for end in range(begin, len(tokens) - DEPTH):
        follower.hear(heard, rows[0][heard : end - 1])
        line, heard, begun = Line(follower, tokens[:end], WIDTH), end - 1, time.process_time()
        (one,) = own.continuations([line], [DEPTH])
        timed.add(begun, DEPTH)
        found.append(Said(one.chain, [Place.of(*told) for told in zip(one.chain, line.candidates, strict=True)]))
    follower.close()
    return found


def best(found: dict[Way, tuple[float, float]], costs: Latency, drafting_ms: float) -> Bound:
    """The best of what a way's depths and nodes brought; `found`: tokens and rows of a verify."""
    step = costs.milliseconds(1)
    bounds = [
        Bound(tokens * step / (costs.milliseconds(round(rows)) + way.depth * drafting_ms), tokens, rows, way.depth)
        for way, (tokens, rows) in found.items()
    ]
    return max(bounds, key=lambda bound: bound.gain)


def forward_costs(model: LoadedModel) -> Latency:
    drafts = (0, *NODES)
    told = forwards.times(model, 1, COLUMNS, drafts, time.process_time)
    return Latency(tuple((1 + count, ms) for count, ms in zip(drafts, told["ms"], strict=True)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", default=str(EMBEDDED_HEADS / "mtp"))
    parser.add_argument("--prompts", type=int, default=8, help="prompts, all classes in turn")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each text")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--today", type=float, default=0.0, help="what the best mode brings over AR today, if measured")


@dataclass(frozen=True, slots=True)
class Measured:
    """Known texts, how long the target's forwards take, and a token of the draft model's chains and of the head's."""

    texts: Sequence[Text]
    costs: Latency
    draft_ms: float
    head_ms: float


def measure(options: argparse.Namespace) -> Measured:
    model, head_ms, draft_ms = load(str(EMBEDDED_TARGET)), Timed(), Timed()
    drafter = MlxDrafter.load(str(EMBEDDED_DRAFT), lambda stage: None)
    kind = kind_of(options.head, EMBEDDED_TARGET) or "mtp"
    head = load_head(kind, options.head, model, lambda stage: None)
    texts = []
    for number, prompt in enumerate(mixed_tokens(options.prompts + WARM_UP)):
        sampling = SamplingParams(temp=options.temp, seed=number, max_tokens=options.tokens, ignore_eos=True)
        (slot,) = open_slots(model, [prompt], [sampling])
        rest = tuple(verify(slot).bonus for _ in range(options.tokens))
        slot.close()
        begun = time.process_time()
        said = thoughts(prompt, rest, sampling, drafter)
        draft_ms.add(begun, DEPTH * len(said))
        of_head = head_thoughts(model, head, [*prompt, *rest], len(prompt), sampling, head_ms)
        texts.append(Text(prompt, rest, {DRAFT_MODEL: said, HEAD: of_head}))
    return Measured(texts, forward_costs(model), draft_ms.median, head_ms.median)


def run(options: argparse.Namespace) -> int:
    measured = measure(options)
    times = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in measured.costs.points)
    print(f"forwards, ms by rows: {times}")
    print(f"a drafted token, ms: draft model {measured.draft_ms:.2f}, head {measured.head_ms:.2f}\n", flush=True)
    sizes = [(most, depth) for most, depth in product(NODES, DEPTHS) if depth <= most]
    tried = [replace(way, most=most, depth=depth) for way in WAYS for most, depth in sizes]
    sums = through(measured.texts, tried)
    found = {way: (one.per_verify, 1 + one.nodes / one.rounds) for way, one in sums.items()}
    print("| | ahead, over AR | tokens a verify, rows, K | free, over AR | tokens a verify, rows, K |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        own = {one: told for one, told in found.items() if one.name == way.name}
        head_ms = measured.head_ms if HEAD in way.drafters else 0.0
        bounds = [best(own, measured.costs, drafting_ms) for drafting_ms in (head_ms, 0.0)]
        cells = [f"{one.gain:.2f} | {one.tokens:.2f}, {one.rows:.1f}, {one.depth}" for one in bounds]
        print(f"| {way.name} | {' | '.join(cells)} |", flush=True)
    if options.today:
        print(f"\n{GOAL} times today's {options.today:.2f} is {GOAL * options.today:.2f} times AR")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
