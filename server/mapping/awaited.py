"""What requests may name and the engine can't do yet: refused here, in one place, and nowhere else.

Who teaches the engine log probabilities or grammars takes the line out and puts the field into `Manner`.
"""

from __future__ import annotations

from typing import Any

from outrider.server.problems import Refused

_FREE_TEXT = {"type": "text"}


def refuse_probabilities(logprobs: bool | int | None, top_logprobs: int | None) -> None:
    """`logprobs` and `top_logprobs`. Raises Refused."""
    for name, value in (("logprobs", logprobs), ("top_logprobs", top_logprobs)):
        if value is not None and value is not False and (name == "logprobs" or value > 0):
            raise Refused(f"{name}: log probabilities are not given here; leave it out", name)


def refuse_best_of(best_of: int | None, n: int | None) -> None:
    """`best_of` beyond `n` needs log probabilities, by which the best is chosen. Raises Refused."""
    if best_of is not None and best_of != (n or 1):
        raise Refused(f"best_of is {best_of}: which text is best is not known here; expected n or nothing", "best_of")


def refuse_grammar(response_format: dict[str, Any] | None, grammar: str | None, name: str = "response_format") -> None:
    """JSON modes, schemas and grammars. Raises Refused."""
    if grammar is not None:
        raise Refused("grammar: text can't be held to a grammar here; leave it out", "grammar")
    if response_format is not None and response_format.get("type", "text") != "text":
        kind = str(response_format.get("type"))[:40]
        raise Refused(f"{name}: text can't be held to {kind} here; expected {_FREE_TEXT} or nothing", name)
