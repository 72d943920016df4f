"""Checks that random concurrent requests have the same texts as alone: the tiny pair in real processes.

    python -m tests.harness.random_identity                     # 2,000 requests, 1, 4 and 16 at once: 20 minutes
    python -m tests.harness.random_identity --requests 240 --seed 7
    python -m tests.harness.random_identity --first 960         # continues an interrupted run

The requests use all modes, T = 0 and 0.8, penalties, biases, filters, stop strings, end tokens, prompts of 1 to 900
tokens, and cancellation at any token. The reference is the request's text in `ar` on a separate cluster without
drafter, prompt cache and other requests; four requests share a reference. Tokens, text and finish reason must be equal;
of cancelled requests, the beginning. Differing texts are replayed teacher-forced through the target: differences that
rounding explains are listed as ties; for others the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.bench.commands.files import parse_numbers
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.cli.verify import Output, certify, find_faults
from outrider.orchestrator.client.client import BaseClient
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol import values
from outrider.protocol.stats import Claim
from tests.harness.default_model import all_prompt_tokens, default_codec, model_folder
from tests.harness.random_requests import MODES, Sizes, draw_prompt, draw_request
from tests.harness.requests import FullReply, TimedRequest, send, send_all

# Requests per block, after which a line is printed.
BLOCK = 240
SAME, TIE, DIFFERENT = "same", "tie", "DIFFERENT"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a request's text, generated with `at_once` concurrent requests, with its text alone.

    `why`: the difference.
    """

    number: int
    at_once: int
    request: TimedRequest
    verdict: str
    why: str = ""

    def __str__(self) -> str:
        asked, params = self.request, self.request.sampling
        how = f"{asked.mode}, {self.at_once} at once, a prompt of {len(asked.tokens)} tokens, T = {params.temp:g}"
        return f"{self.verdict}: request {self.number}, {how}: {self.why}"


def describe_difference(request: TimedRequest, reply: FullReply, alone: FullReply) -> str:
    """Describes how a reply differs from the reply without concurrent requests; returns "" if it does not."""
    count = len(reply.token_ids)
    if reply.token_ids != (alone.token_ids[:count] if reply.cancelled else alone.token_ids):
        pairs = enumerate(zip(reply.token_ids, alone.token_ids, strict=False))
        at = next((place for place, (ours, theirs) in pairs if ours != theirs), min(count, len(alone.token_ids)))
        return f"another token at {at} of {len(alone.token_ids)}"
    if reply.text != (alone.text[: len(reply.text)] if reply.cancelled else alone.text):
        return f"the text {reply.text[-40:]!r}, not {alone.text[-40:]!r}"
    return "" if reply.cancelled or reply.reason == alone.reason else f"ended by {reply.reason}, not {alone.reason}"


def compare_reply(
    number: int, at_once: int, request: TimedRequest, reply: FullReply, alone: FullReply, codec: TextCodec
) -> Comparison:
    """Compares a reply with the one without concurrent requests. Replays it through the target if they differ."""
    why = describe_difference(request, reply, alone)
    if not why:
        return Comparison(number, at_once, request, SAME)
    claim = Claim(str(model_folder()), request.tokens, reply.token_ids, request.sampling)
    report = certify(claim, lambda _: None)
    found: Sequence[object] = report.mismatches[:1]
    if not found and not reply.cancelled:
        output = Output("", "", False, len(request.tokens), request.sampling, reply.token_ids, reply.text, reply.reason)
        found = find_faults(output, codec, request.tokens, report.context_length)
    holds = not found and bool(report.ties)
    return Comparison(number, at_once, request, TIE if holds else DIFFERENT, f"{why}; {found or report.ties}")


def count_verdicts(found: Sequence[Comparison]) -> str:
    """Returns how many texts have each verdict."""
    return ", ".join(f"{sum(one.verdict == word for one in found)} {word}" for word in (SAME, TIE, DIFFERENT))


@dataclass(frozen=True, slots=True)
class IdentityRun:
    """Sends random requests to a cluster, and compares them with their texts alone, from the client `plain`."""

    client: BaseClient
    plain: BaseClient
    codec: TextCodec
    seed: int
    sizes: Sizes
    progress: Tell

    def run_block(self, first: int, count: int, widths: Sequence[int]) -> list[Comparison]:
        """Runs `count` requests from number `first` on: first alone, then an equal share of them at each concurrency in
        `widths`."""
        source = all_prompt_tokens()
        numbers = range(first, first + count)
        prompts = {n: draw_prompt(n, self.seed, source, self.sizes) for n in sorted({n // len(MODES) for n in numbers})}
        alone = {}
        for place, (number, (tokens, sampling)) in enumerate(prompts.items()):
            self.progress(f"alone: {place} of {len(prompts)}")
            alone[number] = send(self.plain, TimedRequest(tokens, sampling, "ar"))
        order = random.Random(first).sample(numbers, count)
        found = []
        for place, width in enumerate(widths):
            chosen = order[place * count // len(widths) : (place + 1) * count // len(widths)]
            asked = [draw_request(n, self.seed, prompts[n // len(MODES)]) for n in chosen]
            replies = send_all(self.client, asked, width)
            for done, (number, one, reply) in enumerate(zip(chosen, asked, replies, strict=True)):
                self.progress(f"{width} at once: {done} of {len(chosen)}")
                found.append(compare_reply(number, width, one, reply, alone[number // len(MODES)], self.codec))
        return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="requests (default: 2000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request (default: 0)")
    parser.add_argument("--at-once", default="1,4,16", metavar="N,N,...", help="concurrency (default: 1,4,16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the requests (default: 0)")


def run(options: argparse.Namespace) -> int:
    end = values.check_int("requests", options.requests, 1, 1_000_000)
    first = values.check_int("first", options.first, 0, end - 1)
    widths = [values.check_int("at-once", width, 1, 256) for width in parse_numbers("at-once", options.at_once, int)]
    codec, screen = default_codec(), Screen()
    found: list[Comparison] = []
    with (
        LocalCluster(progress=screen.show, draft_backend="none", mode="ar", prompt_cache=False, max_active=1) as alone,
        LocalCluster(progress=screen.show, max_active=max(widths)) as cluster,
    ):
        identity_run = IdentityRun(cluster.client(), alone.client(), codec, options.seed, Sizes(), screen.show)
        for begin in range(first, end, BLOCK):
            numbers = f"requests {begin} to {min(begin + BLOCK, end)}"
            progress = lambda status, numbers=numbers: screen.show(f"{numbers}, {status}")  # noqa: E731
            block = replace(identity_run, progress=progress).run_block(begin, min(BLOCK, end - begin), widths)
            screen.clear()
            print("\n".join([*(str(one) for one in block if one.verdict != SAME), _summary(block)]), flush=True)
            found += block
    print(f"all, seed {options.seed}: {_summary(found)}")
    return int(any(one.verdict == DIFFERENT for one in found))


def _summary(found: Sequence[Comparison]) -> str:
    return f"requests {min(o.number for o in found)} to {max(o.number for o in found)}: {count_verdicts(found)}"


if __name__ == "__main__":
    raise SystemExit(run_as_program())
