"""`auto` over all drafters of a cluster against each of them alone, by class of text, in turns, on real processes.

    python -m outrider.bench.drafters --head early-exit --head PATH      # the embedded pair and these
    python -m outrider.bench.drafters --head PATH --temp 0.8 --prompts 4

Auto reads some texts of a class before, as a server that has been used has. The best is picked by the very runs that
auto is held against, so luck makes it look better than it is, not worse. The exit code is 1 when in a class the whole
interval lies under --least.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from outrider.bench import prompts
from outrider.bench.contest.contest import Ours, compete
from outrider.bench.contest.statistics import Interval, Timed, ratio, total_rate
from outrider.orchestrator.cli import flags, run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.heads import drafters
from outrider.orchestrator.pair.pairing import choose_pair, read_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.heads import DRAFT_MODEL, is_joint
from outrider.protocol.sampling import SamplingParams

AUTO, PLAIN = "auto", "ar"


def ways(client: Client, names: tuple[str, ...], works_ahead: bool) -> list[Ours]:
    """Auto, plain decoding, SSD, SSD with a head beside the draft worker, and SD by each drafter alone."""
    ahead = [Ours("ssd", client, "ssd")] if works_ahead else []
    both = [Ours(f"ssd by {name}", client, "ssd", drafter=name) for name in names if is_joint(name)]
    alone = [Ours(f"sd by {name}", client, "sd", drafter=name) for name in names if not is_joint(name)]
    return [Ours(AUTO, client, "auto"), Ours(PLAIN, client, "ar"), *ahead, *both, *alone]


def report(kind: str, times: dict[str, list[Timed]]) -> Interval:
    """Prints each way's rate over plain decoding; auto over the best of the others, which it returns."""
    others = [name for name in times if name != AUTO]
    best = max(others, key=lambda name: total_rate(times[name]))
    against = ratio(times[AUTO], times[best])
    shown = "  ".join(f"{name} {ratio(times[name], times[PLAIN])}" for name in times if name != PLAIN)
    print(f"{kind:9} auto / {best}: {against}   over ar: {shown}", flush=True)
    return against


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="prompts of each class, default 6")
    parser.add_argument(
        "--before", type=int, default=2, metavar="N", help="texts of it that auto read before, default 2"
    )
    parser.add_argument("--tokens", type=int, default=192, metavar="N", help="tokens of each run, default 192")
    parser.add_argument("--temp", type=float, default=0.0, metavar="T")
    parser.add_argument("--kinds", default=",".join(prompts.CLASSES), help="which classes, with commas between")
    parser.add_argument("--least", type=float, default=0.97, help="what auto must bring of the best, default 0.97")
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    given, screen, missed = flags.settings_of(options), Screen(), False
    pair = choose_pair(ServeSettings(**given))
    codec = read_pair(pair).codec
    sampling = SamplingParams(max_tokens=options.tokens, temp=options.temp, ignore_eos=True)
    names = drafters(pair.settings)
    with LocalCluster(progress=screen.show, **{**given, "memory": False}) as cluster:
        found = ways(cluster.client(), names, DRAFT_MODEL in names and pair.settings.has_draft_worker)
        for kind in options.kinds.split(","):
            texts = [codec.encode(prompt.text) for prompt in prompts.load(kind)[: options.before + options.prompts]]
            before, texts = texts[: options.before], texts[options.before :]
            for text in before:
                found[0].run(text, replace(sampling, seed=1))
            runs = compete(found, texts, sampling, screen.show)
            screen.clear()
            against = report(kind, {name: [run.timed for run in of_way] for name, of_way in runs.items()})
            missed |= against.high < options.least
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
