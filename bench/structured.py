"""Structured text: how much quicker it comes with drafts that obey the grammar, and what the grammar itself costs.

    python -m outrider.bench.structured                      # 16 prompts, T = 0 and 0.8: four minutes
    python -m outrider.bench.structured --prompts 4 --temps 0.8

The embedded pair, every mode in turns on the same prompts and seeds: JSON by a schema, and then free text against the
same text under a grammar that allows everything. Every JSON that ended is parsed and looked over. The exit code is 1
when modes differ or a text is not by its schema.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.bench.commands.lists import numbers
from outrider.bench.contest.contest import Ours, Run, compete
from outrider.bench.contest.statistics import ratio, total_rate
from outrider.bench.contest.summary import summary
from outrider.bench.embedded import embedded_codec, mixed_tokens
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.grammar import Grammar
from outrider.protocol.sampling import SamplingParams

MODES = ("ar", "sd", "ssd", "auto")
FREE, LOOSE = "free", "under a grammar for anything"
WARM_UP, FREE_TOKENS = 2, 96
ANYTHING = Grammar("regex", r"(.|\n)*")
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 24},
        "kind": {"enum": ["function", "method", "class", "module"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
        "public": {"type": "boolean"},
        "arguments": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "line", "public", "arguments"],
    "additionalProperties": False,
}
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "array",
    "items": RECORD,
    "minItems": 3,
    "maxItems": 5,
}


def grammared(name: str, way: Ours, grammar: Grammar | None) -> Ours:
    """The same way, its texts by this grammar."""
    return replace(way, name=name, sampling={"grammar": grammar, "ignore_eos": grammar is None})


def is_by_schema(run: Run) -> bool:
    """Whether a text that ended is what SCHEMA says, in its outlines."""
    text = embedded_codec().decode(run.tokens[:-1])
    found: Any = json.loads(text)
    return 3 <= len(found) <= 5 and all(list(one) == list(RECORD["properties"]) for one in found)  # type: ignore[call-overload]


def has_ended(run: Run) -> bool:
    return run.tokens[-1] in embedded_codec().eos


def told(name: str, runs: Sequence[Run], against: Sequence[Run]) -> str:
    found, timed = summary([run.timings for run in runs if run.timings is not None]), [run.timed for run in runs]
    share = "" if found.acceptance is None else f", {found.acceptance:.2f} accepted"
    share += "" if found.hit_rate is None else f", {found.hit_rate:.2f} hits"
    per_round = found.tokens / found.rounds
    versus = ratio(timed, [run.timed for run in against])
    return f"  {name:34} {total_rate(timed):6.1f} tokens/s, {versus} of the first, {per_round:.2f} a round{share}"


def by_schema(ways: Sequence[Ours], prompts: Sequence[Sequence[int]], sampling: SamplingParams, screen: Screen) -> int:
    """JSON by SCHEMA in every mode; prints, and returns how many texts are not as they should be."""
    schema = Grammar.json_schema(SCHEMA)
    runs = compete([grammared(way.mode, way, schema) for way in ways], prompts, sampling, screen.show)
    screen.clear()
    same = sum(len({texts[i].tokens for texts in runs.values()}) == 1 for i in range(len(prompts)))
    ended = [one for texts in runs.values() for one in texts if has_ended(one)]
    right = sum(is_by_schema(one) for one in ended)
    cut = sum(len(texts) for texts in runs.values()) - len(ended)
    print(f"T = {sampling.temp:g}: {same} of {len(prompts)} texts the same in all modes; {right} of {len(ended)} that")
    print(f"ended are by the schema, {cut} were cut at {sampling.max_tokens} tokens")
    for name, texts in runs.items():
        print(told(name, texts, runs["ar"]), flush=True)
    return len(prompts) - same + len(ended) - right


def cost(ways: Sequence[Ours], prompts: Sequence[Sequence[int]], sampling: SamplingParams, screen: Screen) -> None:
    """The same free text with a grammar that rules nothing out and without one; prints."""
    pairs = [(way, f"{way.mode}, {FREE}", f"{way.mode}, {LOOSE}") for way in ways]
    both = [(grammared(free, way, None), grammared(loose, way, ANYTHING)) for way, free, loose in pairs]
    runs = compete([way for pair in both for way in pair], prompts, sampling, screen.show)
    screen.clear()
    for _, free, loose in pairs:
        for name in (free, loose):
            print(told(name, runs[name], runs[free]), flush=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16, help="how many prompts, all classes in turn; default 16")
    parser.add_argument("--temps", default="0,0.8", help="with commas between")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of a text, default 256")


def run(options: argparse.Namespace) -> int:
    temps = numbers("temps", options.temps, float)
    length = values.whole("tokens", options.tokens, 2, 600)
    prompts, screen, bad = mixed_tokens(options.prompts), Screen(), 0
    with LocalCluster(progress=screen.show, ngrams=False) as cluster:
        ways = [Ours(mode, cluster.client(), mode) for mode in MODES]
        for temp in temps:
            sampling = SamplingParams(max_tokens=length, temp=temp)
            compete(ways, prompts[:WARM_UP], sampling, screen.show)
            bad += by_schema(ways, prompts, sampling, screen)
            cost([ways[0], ways[2]], prompts, replace(sampling, max_tokens=FREE_TOKENS), screen)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
