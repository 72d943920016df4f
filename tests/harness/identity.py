"""Checks that texts have the target's own tokens in every mode and setting: the tiny pair in real processes.

    python -m tests.harness.identity                          # 50 prompts x 200 tokens: three hours on two cores
    python -m tests.harness.identity --at-once 8              # as many requests in each forward: an hour
    python -m tests.harness.identity --prompts 4 --tokens 60  # minutes

The reference is `ar` of the first cluster, one request at a time, and at temperature 0 mlx-lm's own plain decoding on
the same weights. Every setting below generates every prompt's text at temperature 0, and at 0.7 and 1.0 with top-p
0.95, penalties and a seed for each prompt. A text that differs is replayed teacher-forced through the target:
differences that rounding explains are ties; for any other difference the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from outrider.bench.comparison.peers import mlx_lm
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.cli.verify import certify
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import TINY_DRAFT, TINY_TARGET
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Claim
from tests.harness.default_model import Prompt, default_codec, mixed_prompts
from tests.harness.requests import TimedRequest, send_all

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """A mode with its K and B; None: the server's."""

    mode: str
    depth: int | None = None
    branches: int | None = None

    def request(self, case: Case) -> TimedRequest:
        return TimedRequest(case.tokens, case.params, self.mode, num_draft_tokens=self.depth, branches=self.branches)

    def __str__(self) -> str:
        marks = [f"K={self.depth}"] * (self.depth is not None) + [f"B={self.branches}"] * (self.branches is not None)
        return " ".join([self.mode, *marks])


AR = Arm("ar")
SD3, SSD3, SSD6, AUTO = Arm("sd", 3), Arm("ssd", 3, 12), Arm("ssd", 6, 24), Arm("auto")
CLUSTERS: dict[str, tuple[dict[str, Any], tuple[Arm, ...]]] = {
    "best-first": ({}, (
        AR,
        Arm("sd", 1), SD3, Arm("sd", 6),
        Arm("ssd", 1, 4), Arm("ssd", 1, 12), Arm("ssd", 3, 4), SSD3, Arm("ssd", 3, 24), Arm("ssd", 6, 4), SSD6,
        AUTO,
    )),
    "geometric": ({"fan_out": "geometric"}, (Arm("ssd", 1, 4), SSD3, SSD6)),
    "uniform": ({"fan_out": "uniform"}, (Arm("ssd", 1, 4), SSD3, SSD6)),
    "full depth": ({"branch_depth": "full"}, (SSD3,)),
    "model alone": ({"ngrams": False}, (SD3, SSD3, SSD6)),
    "n-gram alone": ({"draft_backend": "ngram"}, (SD3, Arm("ssd", 6), AUTO)),
    "random draft": ({}, (SD3, SSD3, AUTO)),
}  # fmt: skip
"""The clusters: their settings, and the modes to run on each."""
SAMPLINGS = {
    "T=0": SamplingParams(),
    "T=0.7": SamplingParams(temp=0.7, top_p=0.95, repetition_penalty=1.1),
    "T=1.0": SamplingParams(temp=1.0, top_p=0.95, presence_penalty=0.3, frequency_penalty=0.1),
}


@dataclass(slots=True)
class Tally:
    """Counts how the texts of one mode compare with the reference."""

    same: int = 0
    ties: int = 0
    different: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.same} same"] + [f"{self.ties} by a tie"] * bool(self.ties)
        return ", ".join(parts + [f"{len(self.different)} DIFFERENT"] * bool(self.different))


class IdentityCheck:
    """Keeps the reference texts, compares others with them, and replays differing ones through the target."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reference: dict[tuple[str, str], tuple[int, ...]] = {}
        self.tallies: dict[tuple[str, str], Tally] = {}

    def compare(self, row: str, sampling: str, case: Case, tokens: Sequence[int]) -> None:
        expected = self._reference.setdefault((sampling, case.prompt.name), tuple(tokens))
        tally = self.tallies.setdefault((row, sampling), Tally())
        if tuple(tokens) == expected:
            tally.same += 1
            return
        report = certify(Claim(str(TINY_TARGET), case.tokens, tuple(tokens), case.params), self._progress)
        if report.holds and len(tokens) == len(expected):
            tally.ties += 1
        else:
            tally.different.append(f"{row}, {sampling}, {case.prompt.name}: {report.mismatches[:1] or len(tokens)}")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with its tokens, and how its text is sampled."""

    prompt: Prompt
    tokens: tuple[int, ...]
    params: SamplingParams


def cases(prompts: Sequence[Prompt], sampling: str, length: int) -> list[Case]:
    codec = default_codec()
    params = replace(SAMPLINGS[sampling], max_tokens=length, ignore_eos=True)
    return [Case(p, codec.encode(p.text), replace(params, seed=1000 + n)) for n, p in enumerate(prompts)]


@contextmanager
def cluster(name: str, at_once: int, progress: Progress) -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_active": at_once, **CLUSTERS[name][0]}
        if name == "random draft":
            settings |= {"model": str(TINY_TARGET), "draft_model": str(write_scrambled(TINY_DRAFT, Path(folder)))}
        with LocalCluster(progress=progress, **settings) as running:
            yield running.client()


def check_all(
    prompts: Sequence[Prompt],
    length: int,
    clusters: Sequence[str],
    samplings: Sequence[str],
    at_once: int,
    progress: Progress,
) -> IdentityCheck:
    """Runs all modes of these clusters with `at_once` concurrent requests.

    The first mode of the first cluster gives the reference texts, one request at a time.
    """
    check = IdentityCheck(progress)
    for name in clusters:
        with cluster(name, at_once, progress) as client:
            for sampling in samplings:
                for number, arm in enumerate(CLUSTERS[name][1]):
                    progress(f"{name}, {arm}, {sampling}")
                    alone = name == clusters[0] and number == 0
                    asked = cases(prompts, sampling, length)
                    replies = send_all(client, [arm.request(case) for case in asked], 1 if alone else at_once)
                    for case, reply in zip(asked, replies, strict=True):
                        check.compare(f"{name}: {arm}", sampling, case, reply.token_ids)
    if "T=0" in samplings:
        compare_peer(check, cases(prompts, "T=0", length), progress)
    return check


def compare_peer(check: IdentityCheck, greedy: Sequence[Case], progress: Progress) -> None:
    with mlx_lm(choose_pair(ServeSettings()).settings) as peer:
        for case in greedy:
            progress(f"mlx-lm: {case.prompt.name}")
            tokens = peer.run(case.tokens, case.params, num_draft_tokens=0).tokens
            check.compare("mlx-lm: plain decoding", "T=0", case, tokens)


def table(check: IdentityCheck) -> str:
    rows = list(dict.fromkeys(row for row, _ in check.tallies))
    cells = [[row, *(str(check.tallies.get((row, sampling), "-")) for sampling in SAMPLINGS)] for row in rows]
    cells.insert(0, ["", *SAMPLINGS])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells)


def write_scrambled(model: Path, folder: Path, seed: int = 0) -> Path:
    """Writes a useless draft to `folder`, and returns it: `model`'s weights, shuffled within each tensor.

    Norms are kept, so that logits keep their size.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    rng = np.random.default_rng(seed)
    shuffled = {
        name: value if value.ndim < 2 else rng.permutation(value.ravel()).reshape(value.shape)
        for name, value in sorted(load_file(model / "model.safetensors").items())
    }
    save_file(shuffled, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=50, help="prompts, of all classes in turn")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per text")
    parser.add_argument("--at-once", type=int, default=1, help="concurrent requests, except for the reference")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), help="clusters to run")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), help="only these")


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.tokens <= 600:
        raise InvalidRequest(f"tokens is {options.tokens}; expected 1 to 600, the pair's context being 1,024")
    screen = Screen()
    check = check_all(
        mixed_prompts(options.prompts),
        options.tokens,
        options.clusters,
        options.samplings,
        options.at_once,
        screen.show,
    )
    screen.clear()
    print(table(check))
    different = [line for tally in check.tallies.values() for line in tally.different]
    print("\n".join(different) or f"No difference in {sum(t.same + t.ties for t in check.tallies.values())} texts.")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
