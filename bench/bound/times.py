"""What the target's forwards take alone and beside a drafter at work, and drafting in the target's own process.

By the product's real workers, wall clock: a process with a core of its own is rarely put off, and processor time grows
by contention just as wall time does. All kinds in turns, prompt by prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.bench.timing import heads
from outrider.bench.timing.curve import Curve, medians, milliseconds
from outrider.bench.timing.heads import Way
from outrider.bench.timing.workbench import Workbench
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams

ALONE, ONE, ALL = 0, 1, 16
"""How many branches a drafter grows beside the verify: it rests, grows one, or as many as SSD has by default."""
ROWS = (1, 2, 3, 4, 5, 7, 9, 13)
DRAFTED = (1, 3)  # tokens of a chain in the target's process
ROUNDS = 4  # of each kind in a row, the first of which does not count
ENDLESS, ROOM = 1 << 20, 160


@dataclass(frozen=True, slots=True)
class Times:
    """Of one prompt's text, medians in milliseconds: `verify_ms[branches]` by rows, `drafting_ms[name]` by tokens."""

    verify_ms: Mapping[int, Curve]
    drafting_ms: Mapping[str, Curve]


def verify_times(bench: Workbench, prompt: Sequence[int], sampling: SamplingParams) -> Mapping[int, Curve]:
    """Along the target's own text, so that each chain holds; a branch is as long as the chain that it is for."""
    endless = replace(sampling, max_tokens=ENDLESS)
    text, _ = bench.text(prompt, ROOM, endless)
    taken: dict[int, defaultdict[int, list[float]]] = {kind: defaultdict(list) for kind in (ALONE, ONE, ALL)}
    number, told, at = 0, 0, len(text)
    for rows in ROWS:
        for branches, found in taken.items():
            for turn in range(ROUNDS):
                if at + rows > len(text):
                    if number:
                        bench.close()
                    bench.open(text[: len(prompt)], endless, target=True, drafter=True)
                    number, told, at = 0, len(prompt), len(prompt) + 1
                number, chain = number + 1, text[at : at + rows - 1]
                if branches:
                    depth, new = max(rows - 1, 1), text[told:at]
                    outcome, told = bench.both(number, at, new, chain, depth, branches).outcome, at
                else:
                    outcome = bench.verify(number, at, chain)
                if turn:
                    found[rows].append(milliseconds(outcome.work))
                at += outcome.accepted + 1
    bench.close()
    return {branches: medians(found) for branches, found in taken.items()}


def drafting_times(
    client: Client, names: Sequence[str], prompt: Sequence[int], sampling: SamplingParams
) -> Mapping[str, Curve]:
    """What chains of so many tokens take in real rounds of SD, each drafter of the target's process by itself."""
    ways = [Way(name, depth) for name in names for depth in DRAFTED]
    found = heads.measure(client, ways, [prompt], sampling, lambda said: None)
    able = {way: one.known for way, one in found.items() if one.known.acceptance}
    return {
        name: Curve(tuple((way.depth, way.depth * known.step_ms) for way, known in able.items() if way.drafter == name))
        for name in dict.fromkeys(way.drafter for way in able)
    }
