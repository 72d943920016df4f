"""How much of what heads draft the target accepts, beside the embedded draft model, at as many tokens a round.

    python -m tools.heads models/heads/eagle3              # K = 4, T = 0 and 0.8, 16 prompts x 96 tokens
    python -m tools.heads models/heads/* --picture docs/heads.png

All draft in the embedded target's process, fed with its newest rows, chains alone. Prompts are the benchmarks', which
were written for them, and behind these what begins the files that a head's training.json calls held out. No time is
measured, so a busy machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from outrider.bench import picture
from outrider.bench.comparison.runs import Interval, bootstrap
from outrider.bench.prompts import mixed
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import default_codec

DRAFT = "draft model"
_BEGINNING = 600  # characters of a held-out file


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What one drafter did at one temperature, prompt by prompt."""

    name: str
    temp: float
    rounds: tuple[Timings, ...]

    @property
    def per_verify(self) -> Interval:
        return bootstrap(self.rounds, lambda some: sum(t.predicted_n for t in some) / sum(t.rounds for t in some))

    @property
    def by_position(self) -> list[float]:
        """Of the rounds that drafted so far, the share whose tokens were accepted up to there."""
        accepted = _summed([t.accepted_by_position for t in self.rounds])
        drafted = _summed([t.drafted_by_position for t in self.rounds])
        return [held / all_ for held, all_ in zip(accepted, drafted, strict=False) if all_]


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """Place by place."""
    return [sum(places) for places in zip_longest(*counts, fillvalue=0)]


def measure(head: Path | None, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[HeadResult]:
    """By temperature. None: the embedded draft model."""
    name = DRAFT if head is None else head.name
    found = []
    with LocalCluster(
        model=str(EMBEDDED_TARGET),
        draft_model=str(head or EMBEDDED_DRAFT),
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
                result = client.generate(prompt, sampling, mode="sd", num_draft_tokens=options.depth)
                rounds.append(result.timings)
            found.append(HeadResult(name, temp, tuple(rounds)))
    return found


def held_out(head: Path, count: int) -> list[str]:
    """What begins so many of the library's files that the head has not seen; nothing for one without a record."""
    record = head / "training.json"
    if not record.is_file():
        return []
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / name for name in json.loads(record.read_text(encoding="utf-8"))["held_out"]]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return [text[:_BEGINNING] for text in texts if len(text) > _BEGINNING][:count]


def told(drafted: Sequence[HeadResult]) -> list[str]:
    lines = ["T     drafter          tokens per verify, 95 % by prompts   accepted by position"]
    for one in sorted(drafted, key=lambda one: one.temp):
        shares = "  ".join(f"{share:.3f}" for share in one.by_position)
        lines.append(f"{one.temp:<4g}  {one.name:<15}  {one.per_verify!s:<35}  {shares}")
    return lines


def draw(drafted: Sequence[HeadResult], path: Path) -> None:
    """A panel a temperature: how far chains are accepted."""
    temps = sorted({one.temp for one in drafted})
    figure = picture.figure(4.2 * len(temps), 3.4)
    for number, temp in enumerate(temps):
        axes = figure.add_subplot(1, len(temps), number + 1)
        for one in (one for one in drafted if one.temp == temp):
            places = range(1, len(one.by_position) + 1)
            style = "--" if one.name == DRAFT else "-"
            axes.plot(
                places, one.by_position, style, marker="o", label=f"{one.name} ({one.per_verify.value:.2f} a verify)"
            )
        axes.set(title=f"T = {temp:g}", xlabel="place in the chain", ylim=(0, 1), xticks=list(places))
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("share of chains accepted up to there")
    picture.save(figure, path, 130)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", type=Path, nargs="+", help="folders of heads for the embedded target")
    parser.add_argument("--depth", type=int, default=4, help="K")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=8, help="so many of the benchmarks', and of held-out files")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--picture", type=Path, help="draw it here as well")


def run(options: argparse.Namespace) -> int:
    options.screen = Screen()
    texts = [prompt.text for prompt in mixed(options.prompts)] + held_out(options.heads[0], options.prompts)
    prompts = [default_codec().encode(text) for text in texts]
    drafted = [one for head in (None, *options.heads) for one in measure(head, prompts, options)]
    options.screen.clear()
    print(f"K = {options.depth}, {len(prompts)} prompts x {options.tokens} tokens")
    print("\n".join(told(drafted)))
    if options.picture:
        draw(drafted, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
