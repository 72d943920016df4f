"""Compares AR, SD, SSD and auto with mlx-lm on the same weights and prompts, in turns; losses included."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.cli import flags
from orchestrator.cli.screen import Screen
from orchestrator.client.cluster import LocalCluster
from orchestrator.machine import blas
from orchestrator.pair.model_files import ROOT
from orchestrator.pair.pairing import choose_pair
from orchestrator.pair.tokenizer import load_codec
from orchestrator.settings import ServeSettings
from orchestrator.study import report
from orchestrator.study.contest import Contestant, Ours, Peer, PeerProcess, Run, compete, read_prompts
from orchestrator.study.statistics import total_rate
from protocol.errors import InvalidRequest
from protocol.sampling import SamplingParams

PROMPTS = ROOT / "bench" / "prompts"
BASELINE = "ar"
# The settings of each family are chosen on this many prompts before the main run.
TRIAL_PROMPTS = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench")
    group.add_argument("--prompts", type=int, default=24, metavar="N", help="prompts of each class, default 24")
    group.add_argument("--classes", default="code", help="comma-separated: code,repeated,prose,json; default code")
    group.add_argument("--temps", default="0,0.8", help="comma-separated temperatures, default 0,0.8")
    group.add_argument("--depths", default="2,3,4", help="K to try for SD, SSD and mlx-lm, default 2,3,4")
    group.add_argument("--max-tokens", "-m", type=int, default=128, metavar="N", help="of each run, default 128")
    group.add_argument("--no-peers", action="store_true", help="leave mlx-lm out, as every simulation does")
    group.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for bench.json and bench.png")
    flags.add_request_flags(parser)
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    settings = ServeSettings(**flags.settings_of(options))
    temps, depths = _numbers("temps", options.temps, float), _numbers("depths", options.depths, int)
    classes = {kind: _prompts(kind, options.prompts, settings) for kind in options.classes.split(",")}
    sections, raw = [], {}
    screen = Screen()
    with _field(options, settings, depths, screen) as field:
        for kind, prompts in classes.items():
            for temp in temps:
                sampling = SamplingParams(max_tokens=options.max_tokens, temp=temp, ignore_eos=True)
                runs = _contest(field, prompts, sampling, screen)
                sections.append(report.section(kind, temp, runs, BASELINE))
                raw[f"{kind} T={temp:g}"] = {name: [_plain(run) for run in found] for name, found in runs.items()}
                screen.clear()
                print(report.table(sections[-1]) + "\n", flush=True)
    _write(options.out, sections, settings, raw)
    return 0


Families = dict[str, list[Contestant]]


@contextmanager
def _field(
    options: argparse.Namespace, settings: ServeSettings, depths: Sequence[int], screen: Screen
) -> Iterator[Families]:
    """All contestants by family; within a family only the best settings go on to the main run."""
    given = {k: v for k, v in flags.settings_of(options).items() if k not in ("ngrams", "mode", "num_draft_tokens")}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(progress=screen.show, **given))
        bare = stack.enter_context(LocalCluster(progress=screen.show, ngrams=False, **given))
        copying = {k: v for k, v in given.items() if k not in ("draft_model", "draft_backend", "replay")}
        ngram = stack.enter_context(LocalCluster(progress=screen.show, draft_backend="ngram", **copying))
        families: Families = {
            BASELINE: [Ours(BASELINE, cluster.client(), "ar")],
            "sd": [
                Ours(f"sd {source} K={depth}", where.client(), "sd", depth)
                for depth in depths
                for source, where in (("model", bare), ("n-gram", ngram), ("both", cluster))
            ],
            "ssd": [Ours(f"ssd K={depth}", cluster.client(), "ssd", depth) for depth in depths],
            "auto": [Ours("auto", cluster.client(), "auto")],
        }
        if not options.no_peers and settings.simulate is None:
            pair = choose_pair(settings)
            peers = stack.enter_context(PeerProcess(pair.settings))
            families["mlx-lm"] = [Peer("mlx-lm", peers)]
            families["mlx-lm sd"] = [Peer(f"mlx-lm sd K={depth}", peers, depth) for depth in depths]
        yield families


def _contest(
    field: Families, prompts: Sequence[Sequence[int]], sampling: SamplingParams, screen: Screen
) -> dict[str, list[Run]]:
    """First the best settings of each family on a few prompts, then all prompts with those."""
    trial = compete([c for family in field.values() for c in family], prompts[:TRIAL_PROMPTS], sampling, screen.show)
    rates = {name: total_rate([run.timed for run in runs]) for name, runs in trial.items()}
    best = [max(family, key=lambda contestant: rates[contestant.name]) for family in field.values()]
    return compete(best, prompts, sampling, screen.show)


def _prompts(kind: str, count: int, settings: ServeSettings) -> list[tuple[int, ...]]:
    path = PROMPTS / f"{kind}.txt"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in PROMPTS.glob("*.txt"))) or "none here: run from a checkout"
        raise InvalidRequest(f"there are no prompts of the class {kind!r}; expected some of {known}")
    texts = read_prompts(path)
    if not 1 <= count <= len(texts):
        raise InvalidRequest(f"prompts is {count}; the class {kind} has 1 to {len(texts)}")
    codec = load_codec(choose_pair(settings).target)
    return [codec.encode(text) for text in texts[:count]]


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r}; expected numbers with commas between, like 2,3,4") from None


def _plain(run: Run) -> dict[str, Any]:
    timings = run.timings
    return {
        "tokens": len(run.tokens),
        "seconds": run.timed.seconds,
        "hits": timings.cache_hits if timings else None,
        "misses": timings.cache_misses if timings else None,
        "turnaround_ms": list(timings.turnaround_ms) if timings else None,
    }


def _write(out: Path, sections: list[report.Section], settings: ServeSettings, raw: dict[str, Any]) -> None:
    title = f"K chosen per family, B = {settings.branches}, {settings.threads} BLAS thread per worker"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(report.record(sections, _machine(settings), raw), indent=1))
    except OSError as error:
        raise InvalidRequest(f"the results can't be written to {out}: {error.strerror}") from error
    report.draw(sections, out / "bench.png", title)
    print(f"{title}\nwritten: {out / 'bench.json'}, {out / 'bench.png'}")


def _machine(settings: ServeSettings) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "pyzmq", "numpy")},
        "blas": blas.notes(),
        "threads": settings.threads,
        "branches": settings.branches,
    }
