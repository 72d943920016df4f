"""Writes outcomes as a Markdown page, with a table per family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outrider import __version__
from tests.harness.conformance.case import DIFFERS, PASSES, REFUSED, Outcome

HEAD = f"""# Conformance

The cases come from the public tests of vLLM, llama.cpp and mlx-lm and from OpenAI's and Anthropic's references. They
are rewritten and run against Outrider {__version__}, with the tiny pair and with a tiny chat model that has a
template, thinking and tools. This command writes the page:

    python -m tests.harness.conformance --write docs/conformance.md

The test suite runs the same cases, and fails when a case that passes here does not. A case *passes* if the result is as
expected, is *refused* with the error shown, or *differs* if the answer is another one. If a case does not pass, that is
intended, for the reason given.
"""

CLIENTS = "## Clients\n"
"""The heading of the page's last part, which `tests.harness.programs` writes."""


def clients_of(text: str) -> str:
    """Returns the part about clients of a page, or an empty string."""
    return "".join(text.partition(CLIENTS)[1:])


def page(families: Sequence[tuple[str, Sequence[Outcome]]], clients: str = "") -> str:
    """Returns the whole page. Each family has a title and outcomes; `clients` is the page's last part."""
    every = [one for _, outcomes in families for one in outcomes]
    counts = Counter(one.verdict for one in every)
    summary = ", ".join(f"{counts[verdict]} {word}" for verdict, word in
                     ((PASSES, "pass"), (REFUSED, "are refused"), (DIFFERS, "differ")))  # fmt: skip
    tables = [f"## {title}\n\n{_table(outcomes)}" for title, outcomes in families]
    return "\n".join([HEAD, f"Of {len(every)} cases {summary}.\n", *tables, *([clients] if clients else [])])


def _table(outcomes: Iterable[Outcome]) -> str:
    rows = [f"| {cell(one.case.name)} | {cell(one.case.source)} | {cell(_format_result(one))} |" for one in outcomes]
    return "\n".join(["| expected | where | here |", "|---|---|---|", *rows, ""])


def _format_result(one: Outcome) -> str:
    if one.verdict == PASSES:
        return PASSES
    return f"**{one.verdict}**: {one.message}; {one.case.why or 'not yet'}"


def cell(text: str) -> str:
    """Escapes a text for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def passing(text: str) -> dict[str, bool]:
    """Returns whether each case passes, by name, from the text of a page."""
    lines = text.partition(CLIENTS)[0].splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and line.count(" | ") >= 2]
    return {cells[0].removeprefix("| "): cells[-1].startswith(PASSES) for cells in rows if cells[0] != "| expected"}
