"""Measures how many draft tokens of heads the tiny target accepts, compared with the tiny draft model at the same K.

    python -m tools.heads models/heads/mtp                 # K = 4, T = 0 and 0.8, 16 prompts x 96 tokens
    python -m tools.heads models/heads/* --picture docs/heads.png

All drafters run in the target's process, where heads read its newest hidden states. Prompts are those of the
benchmarks, then the beginnings of the files that the first head's training.json lists as held out. No time is measured,
so the machine may be busy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from models.training.corpus import standard_library
from models.training.record import read_held_out
from outrider.bench.comparison.runs import Interval, bootstrap
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import TINY_DRAFT, TINY_TARGET
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import default_codec, mixed_prompts
from tools import picture

DRAFT_NAME = "draft model"
_BEGINNING_CHARACTERS = 600  # characters of a held-out file


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The timings of one drafter at one temperature, by prompt."""

    name: str
    temp: float
    rounds: tuple[Timings, ...]

    @property
    def per_verify(self) -> Interval:
        return bootstrap(self.rounds, lambda drawn: sum(t.predicted_n for t in drawn) / sum(t.rounds for t in drawn))

    @property
    def by_position(self) -> list[float]:
        """The share of chains whose tokens were accepted up to each position, of the chains that reach it."""
        accepted = _sum_columns([t.accepted_by_position for t in self.rounds])
        drafted = _sum_columns([t.drafted_by_position for t in self.rounds])
        return [some / all_ for some, all_ in zip(accepted, drafted, strict=False) if all_]


def _sum_columns(counts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the sum of each column."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def measure(head: Path | None, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[HeadResult]:
    """Returns a head's results by temperature. None: the tiny draft model."""
    name = DRAFT_NAME if head is None else head.name
    results = []
    with LocalCluster(
        model=str(TINY_TARGET),
        draft_model=str(head or TINY_DRAFT),
        draft_backend="auto" if head else "mlx",
        colocate=head is None,
        ngrams=False,
        prompt_cache=False,
        memory=False,
    ) as cluster:
        client = cluster.client()
        for temp in options.temps:
            rounds = []
            for number, prompt in enumerate(prompts):
                options.screen.show(f"{name}, T = {temp:g}: prompt {number + 1} of {len(prompts)}")
                sampling = SamplingParams(max_tokens=options.tokens, temp=temp, ignore_eos=True, seed=number)
                rounds.append(client.generate(prompt, sampling, mode="sd", num_draft_tokens=options.depth).timings)
            results.append(HeadResult(name, temp, tuple(rounds)))
    return results


def held_out_beginnings(head: Path, count: int) -> list[str]:
    """Returns the beginnings of up to `count` library files that the head was not trained on; none without a record."""
    held_out = read_held_out(head)
    files = [standard_library() / name for name in held_out.names] if held_out is not None else []
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return [text[:_BEGINNING_CHARACTERS] for text in texts if len(text) > _BEGINNING_CHARACTERS][:count]


def format_table(results: Sequence[HeadResult]) -> list[str]:
    lines = ["T     drafter          tokens per verify, 95 % by prompts   accepted up to each position"]
    for result in sorted(results, key=lambda result: result.temp):
        shares = "  ".join(f"{share:.3f}" for share in result.by_position)
        lines.append(f"{result.temp:<4g}  {result.name:<15}  {result.per_verify!s:<35}  {shares}")
    return lines


def draw(results: Sequence[HeadResult], path: Path) -> None:
    """Draws how far chains are accepted, with a panel per temperature."""
    temps = sorted({result.temp for result in results})
    figure = picture.create_figure(4.2 * len(temps), 3.4)
    for number, temp in enumerate(temps):
        axes = figure.add_subplot(1, len(temps), number + 1)
        for result in (result for result in results if result.temp == temp):
            positions = range(1, len(result.by_position) + 1)
            style, label = (
                "--" if result.name == DRAFT_NAME else "-",
                f"{result.name} ({result.per_verify.value:.2f} per verify)",
            )
            axes.plot(positions, result.by_position, style, marker="o", label=label)
        axes.set(title=f"T = {temp:g}", xlabel="position in the chain", ylim=(0, 1), xticks=list(positions))
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("share of chains accepted up to here")
    picture.save(figure, path, 130)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", type=Path, nargs="+", help="folders of heads for the tiny target")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens (default: 4)")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.8], help="temperatures (default: 0 0.8)")
    parser.add_argument("--prompts", type=int, default=8, help="benchmark prompts, and held-out files (default: 8)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per text (default: 96)")
    parser.add_argument("--picture", type=Path, help="also draw a picture here")


def run(options: argparse.Namespace) -> int:
    if options.picture is not None:
        ensure_writable(options.picture.parent, "choose another --picture")
    options.screen = Screen()
    texts = [prompt.text for prompt in mixed_prompts(options.prompts)] + held_out_beginnings(
        options.heads[0], options.prompts
    )
    prompts = [default_codec().encode(text) for text in texts]
    results = [result for head in (None, *options.heads) for result in measure(head, prompts, options)]
    options.screen.clear()
    print(f"K = {options.depth}, {len(prompts)} prompts x {options.tokens} tokens")
    print("\n".join(format_table(results)))
    if options.picture:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
