"""After `outrider tune`: `auto` against the mode, K and B that it recommended, in turns, on real processes.

    python -m outrider.bench.after_tune               # the embedded pair, and the target as its own draft: 10 minutes
    python -m outrider.bench.after_tune --prompts 16 --temp 0.8

Tunes into a folder of its own, so no tuning of yours is read or changed. The exit code is 1 when a ratio lies under
--least.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import Any

from outrider.bench.contest.contest import Ours, compete
from outrider.bench.contest.statistics import ratio
from outrider.bench.embedded import mixed_tokens
from outrider.bench.timing.probe import WORTH_IT
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.learning import tuning
from outrider.orchestrator.core.learning.tuning import Choice
from outrider.orchestrator.machine.spawn import python
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

PAIRS = {
    "embedded pair": {"model": str(EMBEDDED_TARGET), "draft_model": str(EMBEDDED_DRAFT)},
    "self-draft": {"model": str(EMBEDDED_TARGET), "draft_model": str(EMBEDDED_TARGET)},
}
CACHE = "XDG_CACHE_HOME"


def recommended(pair: dict[str, str], temp: float) -> Choice:
    """What `outrider tune` recommends, once it has run.

    Raises:
        InvalidRequest: it saved nothing.
    """
    line = python(
        "-m", "outrider", "tune", "--model", pair["model"], "--draft-model", pair["draft_model"], "--temp", str(temp)
    )
    subprocess.run(line, check=True, stdout=sys.stderr)
    saved = tuning.load(tuning.path_for(choose_pair(ServeSettings(**pair)).settings))  # type: ignore[arg-type]
    found = tuning.nearest(saved, temp)
    if found is None:
        raise InvalidRequest("outrider tune saved nothing; expected a record in its cache")
    plain = next(choice for choice in found.choices if choice.mode == "ar")
    best = found.choices[0]
    return best if best.tokens_per_second > WORTH_IT * plain.tokens_per_second else plain


def compare(pair: dict[str, Any], prompts: int, tokens: int, temp: float, screen: Screen) -> float:
    """Prints auto over the recommended way, which it returns, and over plain decoding."""
    best = recommended(pair, temp)
    texts = mixed_tokens(prompts)
    sampling = SamplingParams(max_tokens=tokens, temp=temp, ignore_eos=True)
    with LocalCluster(progress=screen.show, **pair) as cluster:
        client = cluster.client()
        tuned = Ours("recommended", client, best.mode, best.depth or None, best.branches or None)
        ways = [tuned, Ours("auto", client, "auto"), Ours("ar", client, "ar")]
        runs = compete(ways, texts, sampling, screen.show)
        why = client.generate(texts[0], SamplingParams(max_tokens=2, temp=temp, seed=0), mode="auto").notes
    screen.clear()
    times = {name: [run.timed for run in found] for name, found in runs.items()}
    settings = f"{best.mode} K={best.depth} B={best.branches}"
    against = ratio(times["auto"], times["recommended"])
    print(f"auto / {settings} {against}, auto / ar {ratio(times['auto'], times['ar'])}   {'; '.join(why)}", flush=True)
    return against.value


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts, all classes in turn")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each run")
    parser.add_argument("--temp", type=float, default=0.0, help="temperature, of tune and of the runs")
    parser.add_argument("--least", type=float, default=0.95, help="what auto must bring of the recommended way")
    parser.add_argument("--pairs", default=",".join(PAIRS), help="which, with commas between")


def run(options: argparse.Namespace) -> int:
    screen, missed = Screen(), False
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        for name in options.pairs.split(","):
            if name not in PAIRS:
                raise InvalidRequest(f"no pair is called {name!r}; expected some of {', '.join(PAIRS)}")
            print(f"{name}, T = {options.temp:g}: ", end="", flush=True)
            missed |= compare(PAIRS[name], options.prompts, options.tokens, options.temp, screen) < options.least
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
