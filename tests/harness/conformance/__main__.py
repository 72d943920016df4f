"""Runs the cases of other projects' test suites against a server, and writes their outcomes.

    python -m tests.harness.conformance                              # what does not pass, and how many do
    python -m tests.harness.conformance --only tool                  # those with this word in name, source or family
    python -m tests.harness.conformance --write docs/conformance.md  # all of it, as a page; half a minute

The exit code is 1 if a case without a reason does not pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.orchestrator.cli import run_as_program
from tests.harness.conformance.case import PASSES, Case, Cases, Outcome, Servers, run_case
from tests.harness.conformance.families import FAMILIES
from tests.harness.conformance.servers import serve_both
from tests.harness.conformance.table import clients_of, page

Found = list[tuple[str, list[Outcome]]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this word in name, source or family")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here")


def run(options: argparse.Namespace) -> int:
    with serve_both() as servers:
        found = ask_all(servers, options.only.lower())
    every = [one for _, outcomes in found for one in outcomes]
    missed = [one for one in every if one.verdict != PASSES]
    for one in missed:
        print(f"{one.verdict}: {one.case.name} ({one.case.source})\n    {one.message}\n    {one.case.why or 'WHY?'}")
    print(f"{len(every) - len(missed)} of {len(every)} cases pass; {len(missed)} do not")
    if options.write is not None:
        before = options.write.read_text(encoding="utf-8") if options.write.is_file() else ""
        options.write.write_text(page(found, clients_of(before)), encoding="utf-8")
    return int(any(not one.case.why for one in missed))


def ask_all(servers: Servers, word: str = "") -> Found:
    """Returns the outcomes of all cases with this word, by family."""
    found = [(family.title, [run_case(case, servers) for case in _chosen(family, word)]) for family in FAMILIES]
    return [(title, outcomes) for title, outcomes in found if outcomes]


def _chosen(family: Cases, word: str) -> list[Case]:
    return [case for case in family if any(word in text.lower() for text in (family.title, case.name, case.source))]


if __name__ == "__main__":
    raise SystemExit(run_as_program())
