"""How long one depth of a drafter's tree takes, by number of rows and by how evaluation is asked for.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 taskset -c 1 python -m outrider.bench.tree_step

`lazy` chains the depths on the device and evaluates once; `each` reads every depth before the next is fed, as the
work-ahead loop does. Milliseconds per depth, least and median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from outrider.engine.loading import load
from outrider.engine.open_tree import open_tree, tree_form
from outrider.engine.tree import Tree
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT
from outrider.protocol.sampling import SamplingParams

Grow = Callable[[Tree, Sequence[int], int], None]


def lazy(tree: Tree, tips: Sequence[int], depth: int) -> None:
    nodes = list(tips)
    for _ in range(depth - 1):
        nodes += tree.feed(nodes[-len(tips) :], [None] * len(tips))
    tree.best(nodes)


def each(tree: Tree, tips: Sequence[int], depth: int) -> None:
    nodes = list(tips)
    tree.best(nodes)
    for _ in range(depth - 1):
        nodes = tree.feed(nodes, [None] * len(tips))
        tree.best(nodes)


WAYS: dict[str, Grow] = {"lazy": lazy, "each": each}


def seconds(tree: Tree, rows: int, depth: int, grow: Grow) -> float:
    """One round: forks from the root, `depth` tokens each, then a commit that drops all but one path of two."""
    started_at = time.perf_counter()
    tips = tree.feed([tree.root] * rows, list(range(100, 100 + rows)))
    grow(tree, tips, depth)
    spent = time.perf_counter() - started_at
    after = tree.child(tips[0], tree.best(tips[:1])[0])
    tree.commit(tips[:1] if after is None else [tips[0], after])
    return spent


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(EMBEDDED_DRAFT))
    parser.add_argument("--context", type=int, default=200, help="tokens before the first round")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 10, 12])
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)


def run(options: argparse.Namespace) -> int:
    model = load(options.model)
    params = SamplingParams(temp=options.temp, top_p=options.top_p, seed=1)
    print(f"{options.model}, {tree_form(model).__name__}, {options.context} tokens, depth {options.depth}, ms a depth")
    print(f"{'rows':>4}" + "".join(f"{way + ' min':>12}{'median':>8}" for way in WAYS))
    for rows in options.rows:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        trees = {way: open_tree(model, list(range(2, 2 + options.context)), params) for way in WAYS}
        for turn in range(options.repeat + 2):
            for way, grow in WAYS.items():
                spent = seconds(trees[way], rows, options.depth, grow) / options.depth * 1e3
                times[way] += [spent] if turn > 1 else []
        cells = (f"{min(t):12.2f}{statistics.median(t):8.2f}" for t in times.values())
        print(f"{rows:4}" + "".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
