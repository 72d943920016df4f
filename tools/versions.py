"""Compares the speed of this checkout with another one, on single requests, by mode.

    python -m tools.versions --against ../before                 # 24 prompts, T = 0 and 0.8: ten minutes
    python -m tools.versions --against ../before --modes ssd,auto --prompts 48 --least 0.98

Both clusters run throughout on the same cores, and every prompt goes to both, one right after the other, so that drift
of the machine affects both equally. Each has a client of its own checkout. This checkout's cluster, which starts first,
has measured up to 5 % slower than the other: exchange the checkouts before you believe a small difference. Prints the
ratio of decoding rates (this over the other) with intervals over prompts, and how many texts are equal. The exit code
is 1 if a ratio is below --least.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.commands.files import parse_modes, parse_numbers
from outrider.bench.comparison.runs import PromptRunner, Run, Timed, ratio, run_interleaved, total_rate
from outrider.bench.helper import HelperProcess
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.model_files import PACKAGE_FOLDER
from outrider.protocol import values
from outrider.protocol.digest import CACHE_VARIABLE, cache_folder
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens

SIDE_PROGRAM = Path(__file__).with_name("version_side.py")
THIS, OTHER = "this", "the other"
WARM_UP_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One mode of one checkout."""

    helper: HelperProcess
    mode: str

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        answer = self.helper.ask({
            "tokens": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temp": sampling.temp,
            "seed": sampling.seed,
            "mode": self.mode,
        })  # fmt: skip
        return Run(tuple(answer["tokens"]), Timed(len(answer["tokens"]) - 1, answer["decode_ms"] / 1000))


def require_checkout(folder: Path) -> None:
    """Checks that a folder is the root of a checkout.

    Raises:
        InvalidRequest: it is not.
    """
    if not (folder / "outrider" / "__init__.py").is_file():
        raise InvalidRequest(f"{folder} contains no outrider/; expected the root of a checkout")


@contextmanager
def run_cluster(folder: Path) -> Iterator[HelperProcess]:
    """Runs a cluster of a checkout whose cache folder has models only, so that it has no estimates of earlier runs."""
    with tempfile.TemporaryDirectory() as fresh:
        for models in cache_folder().glob("*/"):
            Path(fresh, models.name).symlink_to(models)
        own = {"PYTHONPATH": str(folder.resolve()), "XDG_CACHE_HOME": fresh, CACHE_VARIABLE: fresh}
        with HelperProcess(str(SIDE_PROGRAM), environment={**os.environ, **own}) as helper:
            yield helper


def report(mode: str, temp: float, ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    now, before = ([run.timed for run in runs] for runs in (ours, theirs))
    same = sum(one.tokens == other.tokens for one, other in zip(ours, theirs, strict=True))
    rates = f"{total_rate(now):.1f} / {total_rate(before):.1f} tokens/s"
    return f"T = {temp:g}, {mode:4} {ratio(now, before)}   {rates}, {same} of {len(ours)} texts equal"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, required=True, metavar="FOLDER", help="the root of the other checkout")
    parser.add_argument("--modes", default="ar,sd,ssd,auto", help="comma-separated modes (default: ar,sd,ssd,auto)")
    parser.add_argument("--temps", default="0,0.8", help="comma-separated temperatures (default: 0,0.8)")
    parser.add_argument("--prompts", type=int, default=24, help="prompts, of all classes in turn (default: 24)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text (default: 128)")
    parser.add_argument("--least", type=float, default=0.0, help="lowest ratio to accept (default: 0)")


def run(options: argparse.Namespace) -> int:
    require_checkout(options.against)
    modes = parse_modes(options.modes)
    temps = parse_numbers("temps", options.temps, float)
    length = values.check_int("tokens", options.tokens, 2, 600)
    screen, missed = Screen(), False
    prompts = mixed_tokens(options.prompts)
    screen.show("starting both clusters")
    with run_cluster(PACKAGE_FOLDER.parent) as now, run_cluster(options.against) as before:
        runners: dict[str, PromptRunner] = {
            f"{mode}, {name}": Side(helper, mode) for mode in modes for name, helper in ((THIS, now), (OTHER, before))
        }
        for temp in temps:
            sampling = SamplingParams(max_tokens=length, temp=temp, ignore_eos=True)
            run_interleaved(
                runners, prompts[:WARM_UP_PROMPTS], sampling, lambda step: screen.show(f"warming up: {step}")
            )
            runs = run_interleaved(runners, prompts, sampling, screen.show)
            screen.clear()
            for mode in modes:
                ours, theirs = runs[f"{mode}, {THIS}"], runs[f"{mode}, {OTHER}"]
                print(report(mode, temp, ours, theirs), flush=True)
                missed |= ratio([run.timed for run in ours], [run.timed for run in theirs]).value < options.least
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
