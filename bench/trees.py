"""Trees of drafts against chains of the same drafter, by budget; unions of origins; and what c(M) makes of them.

    python -m outrider.bench.trees                           # 12 prompts x 128 tokens, T = 0.8: a minute
    python -m outrider.bench.trees --temp 0 --out trees.png

The embedded pair's texts, with the product's own drafting, odds and merging; what holds is known from the text, so only
tokens are counted. `predicted` is what the odds say before each verify. Below, tokens in the time of a plain step on
machines of such a c(M), drafting free: there each tree, and each chain, is as large as that curve says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from outrider.bench.embedded import mixed_tokens
from outrider.bench.picture import figure, save
from outrider.bench.tree_rounds import Cost, Found, Learned, Text, Way, in_rounds, thoughts
from outrider.drafting.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel, load
from outrider.engine.slots import open_slots
from outrider.engine.verify import verify
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.sampling import SamplingParams

BUDGETS = (4, 8, 16, 32)
MODEL = Way("chain")
TREE = Way("tree", beside=True)
COPIES = Way("copies", (), copies=True)
UNION = Way("union", beside=True, copies=True)
WAYS = (MODEL, TREE, COPIES, UNION)
WARM_UP = 3  # texts from which odds are learned before anything counts


def curve(points: dict[int, float]) -> Cost:
    """Straight lines between (rows, cost), straight on beyond."""
    known = sorted(points.items())

    def cost(rows: int) -> float:
        (below, less), (above, more) = known[-2:]
        for one, other in pairwise(known):
            if rows <= other[0]:
                (below, less), (above, more) = one, other
                break
        return less + (more - less) * (rows - below) / (above - below)

    return cost


M3_ULTRA = {1: 1.0, 2: 1.83, 4: 3.26, 8: 6.1}
CURVES: dict[str, Cost] = {
    "M3 Ultra, 4 bit (1.83 at 2, 3.26 at 4, 6.1 at 8)": curve(M3_ULTRA),
    "the same at half the slope": curve({rows: 1 + (cost - 1) / 2 for rows, cost in M3_ULTRA.items()}),
    "the same at a quarter of it": curve({rows: 1 + (cost - 1) / 4 for rows, cost in M3_ULTRA.items()}),
    "two CPU cores, OpenBLAS (1.19 at 4, 1.86 at 16)": curve({1: 1.0, 4: 1.19, 8: 1.40, 16: 1.86}),
    "+6 % a row": curve({1: 1.0, 2: 1.06}),
    "+2 % a row (M5 tiles, bf16)": curve({1: 1.0, 2: 1.02}),
    "flat up to 8 rows, then double": lambda rows: 1.0 if rows <= 8 else 2.0 if rows <= 16 else 4.0,
}


def decode(model: LoadedModel, drafter: MlxDrafter, prompt: tuple[int, ...], sampling: SamplingParams) -> Text:
    (slot,) = open_slots(model, [prompt], [sampling])
    rest = tuple(verify(slot).bonus for _ in range(sampling.max_tokens))
    slot.close()
    return Text(prompt, rest, {DRAFT_MODEL: thoughts(prompt, rest, sampling, drafter)})


def through(texts: Sequence[Text], ways: Iterable[Way]) -> dict[Way, Found]:
    """Every way over every text; the first texts only teach."""
    found = {way: (Found(), Learned()) for way in ways}
    for number, text in enumerate(texts):
        for way, (sums, learned) in found.items():
            in_rounds(text, way, learned, sums if number >= WARM_UP else Found())
    return {way: sums for way, (sums, _) in found.items()}


def run(options: argparse.Namespace) -> int:
    model = load(str(EMBEDDED_TARGET))
    drafter = MlxDrafter.load(str(EMBEDDED_DRAFT), lambda stage: None)
    prompts = mixed_tokens(options.prompts + WARM_UP)
    sampling = SamplingParams(temp=options.temp, seed=0, max_tokens=options.tokens, ignore_eos=True)
    texts = [decode(model, drafter, prompt, replace(sampling, seed=n)) for n, prompt in enumerate(prompts)]
    fixed = [replace(way, most=most) for most in BUDGETS for way in WAYS]
    found = through(texts, fixed)
    _show(found)
    curves = {
        Way(name, way.drafters, way.beside, way.copies, cost=by): name for name, by in CURVES.items() for way in WAYS
    }
    _show_curves(curves, through(texts, curves))
    if options.out is not None:
        _draw(found, fixed, options.out)
    return 0


def _show(found: dict[Way, Found]) -> None:
    print(f"{'':10}{'nodes':>8}{'tokens a verify':>17}{'predicted':>11}   held by origin")
    for way, sums in found.items():
        held = ", ".join(f"{origin.name.lower()} {count}" for origin, count in sorted(sums.by.items()))
        print(f"{way.name:10}{sums.nodes / sums.rounds:8.1f}{sums.per_verify:17.2f}{sums.predicted:11.2f}   {held}")


def _show_curves(names: dict[Way, str], found: dict[Way, Found]) -> None:
    """Tokens in the time of a plain step, drafting free."""
    print(f"\n{'c(M)':52}" + "".join(f"{way.name:>20}" for way in WAYS))
    for name in CURVES:
        own = [sums for way, sums in found.items() if names[way] == name]
        cells = [f"{sums.tokens / sums.cost:.2f} ({sums.nodes / sums.rounds:.1f} nodes)" for sums in own]
        print(f"{name:52}" + "".join(f"{cell:>20}" for cell in cells))


def _draw(found: dict[Way, Found], fixed: Sequence[Way], path: Path) -> None:
    """Tokens a verify, found and predicted, by budget."""
    drawn = figure(6, 4)
    axis = drawn.subplots()
    for way in WAYS:
        own = [found[one] for one in fixed if one.name == way.name]
        (told,) = axis.plot(BUDGETS, [sums.per_verify for sums in own], marker="o", label=way.name)
        axis.plot(BUDGETS, [sums.predicted for sums in own], linestyle=":", color=told.get_color())
    axis.set_ylabel("tokens a verify (dotted: predicted)")
    axis.set_xscale("log", base=2)
    axis.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axis.set_xlabel("nodes of a tree at most")
    axis.legend()
    save(drawn, path, dpi=110)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=12, help="prompts, all classes in turn")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each text")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture")


if __name__ == "__main__":
    raise SystemExit(run_as_program())
