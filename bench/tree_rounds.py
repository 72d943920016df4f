"""Texts that are known, gone through by rounds of trees: of a size, or of what a cost curve says is best.

What is drafted, how odds are learned and how copies merge with it is the product's own; verifying is comparing with the
text. Beyond the product several draft models may say something at once, and each token of a chain has odds of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafting.begin import begin
from outrider.drafting.beside import Said, with_others
from outrider.drafting.calibration import Calibration
from outrider.drafting.drafter import Drafter
from outrider.drafting.fan_out import POLICIES
from outrider.drafting.growth import Wanted
from outrider.drafting.together import Together
from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.proposals.copies import LONGEST_COPY
from outrider.orchestrator.core.proposals.merging import put_copy
from outrider.orchestrator.core.proposals.tree import LARGEST, Drafts, Grown, grown
from outrider.protocol.errors import OutriderError
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.origins import Origin
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import DraftTree, depths, line, spine, walk

Cost = Callable[[int], float]
DEPTH = 12
EVERYTHING, CHAIN = 0.001, 0.999  # which tokens are told beside a chain's: nearly all, none


@dataclass(frozen=True, slots=True)
class Way:
    """Who drafts, chains of up to `depth`, and how large trees are: `most` nodes, or by `cost` as many as pay.

    Of the drafters those in `brief` say a single token a round.
    """

    name: str
    drafters: tuple[str, ...] = (DRAFT_MODEL,)
    beside: bool = False
    copies: bool = False
    most: int = LARGEST
    cost: Cost = lambda rows: 1.0
    depth: int = DEPTH
    brief: tuple[str, ...] = ()

    def depth_of(self, drafter: str) -> int:
        return 1 if drafter in self.brief else self.depth


@dataclass(slots=True)
class Found:
    """What a way brought: sums over `rounds`; `rows[M]` of them verified M tokens."""

    rounds: int = 0
    tokens: int = 0
    expected: float = 0.0
    nodes: int = 0
    forks: int = 0
    cost: float = 0.0
    rows: Counter[int] = field(default_factory=Counter)
    by: dict[Origin, int] = field(default_factory=dict)

    @property
    def per_verify(self) -> float:
        return self.tokens / max(self.rounds, 1)

    @property
    def predicted(self) -> float:
        return self.expected / max(self.rounds, 1)


class Learned:
    """What rounds have taught of each drafter and of copies."""

    def __init__(self) -> None:
        self.calibrations: dict[str, Calibration] = defaultdict(Calibration)
        self.estimates = Estimates()


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, how it goes on, and what each drafter `said` at each place of that."""

    prompt: tuple[int, ...]
    rest: tuple[int, ...]
    said: Mapping[str, Sequence[Said]]


def thoughts(prompt: Sequence[int], rest: Sequence[int], sampling: SamplingParams, drafter: Drafter) -> list[Said]:
    """What the drafter says and thinks at each place of a text, as it does at the beginning of a round there."""
    work = begin(drafter, prompt, sampling, (), POLICIES["uniform"], Calibration())
    together, found = Together(drafter), []
    for at in range(len(rest) - DEPTH):
        work.commit(rest[at - 1 : at] if at else (), Wanted(None, DEPTH, least=EVERYTHING))
        (one,) = together.continuations([work], [DEPTH])
        if isinstance(one, OutriderError) or work.said is None:
            raise OutriderError(f"the drafter says nothing at place {at} of a text; expected {DEPTH} tokens")
        found.append(work.said)
    return found


def in_rounds(text: Text, way: Way, learned: Learned, found: Found) -> None:
    """The whole text in rounds of `way`; adds up what they brought."""
    tokens, at = list(text.prompt), 0
    ngrams = NgramIndex(tokens)
    while at < len(text.rest) - DEPTH:
        said, rest = {name: _first(text.said[name][at], way.depth_of(name)) for name in way.drafters}, text.rest[at:]
        least = EVERYTHING if way.beside else CHAIN
        drafts = [with_others(one.chain, one.places, learned.calibrations[name], least) for name, one in said.items()]
        copy = ngrams.lookup(LONGEST_COPY) if way.copies else Copy()
        tree = merged(drafts, copy, way, learned.estimates)
        parents = tree.parents or line(len(tree.tokens))
        path = walk(tree.tokens, parents, [rest[0], *(rest[depth + 1] for depth in depths(parents))])
        new = rest[: len(path) + 1]
        _add(found, tree, path, way)
        _learn(learned, said, copy, new)
        at += len(new)
        ngrams.extend(new)


def _first(said: Said, depth: int) -> Said:
    return Said(said.chain[:depth], said.places[:depth])


def _learn(learned: Learned, said: Mapping[str, Said], copy: Copy, new: Sequence[int]) -> None:
    for name, one in said.items():
        one.teach(learned.calibrations[name], new)
    learned.estimates.saw_copy(copy, new)
    if contradicted(copy, [one.chain for one in said.values()]):
        learned.estimates.saw_beside(copy, new)


def contradicted(copy: Copy, chains: Sequence[Sequence[int]]) -> bool:
    """Whether all drafters say another first token."""
    return bool(chains and copy.chain) and all(chain[0] != copy.chain[0] for chain in chains)


def merged(all_drafted: Sequence[DraftTree], copy: Copy, way: Way, estimates: Estimates) -> Grown:
    """The tree of this round."""
    drafts = Drafts()
    for drafted in all_drafted:
        count = len(spine(drafted.parents)) or len(drafted.tokens)
        drafts.add(drafted.tokens[:count], drafted.odds[:count], Origin.DRAFTED)
        drafts.add(drafted.tokens, drafted.odds, Origin.GUESSED, drafted.parents)
    if copy.chain:
        beside = contradicted(copy, [drafted.tokens for drafted in all_drafted])
        put_copy(drafts, copy, estimates.beside(copy.matched) if beside else estimates.copied(copy.matched))
    return grown(drafts, way.cost, most=way.most)


def _add(found: Found, tree: Grown, path: Sequence[int], way: Way) -> None:
    found.rounds += 1
    found.tokens += len(path) + 1
    found.expected += tree.expects
    found.nodes += len(tree.tokens)
    found.rows[len(tree.tokens) + 1] += 1
    found.forks += bool(tree.parents)
    found.cost += way.cost(len(tree.tokens) + 1)
    for node in path:
        found.by[tree.by[node]] = found.by.get(tree.by[node], 0) + 1
