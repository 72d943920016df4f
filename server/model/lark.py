"""A grammar in Lark's notation that grows rule by rule, and the few things that ours are made of.

Text is spelled by the model's own marks where it has them as special tokens, which bytes in a grammar do not match.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from outrider.grammar.vocabulary import Vocabulary

ANY = "/(?s:.*)/"


class Rules:
    """Each rule has a name of its own. What a method returns is an expression for others to use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._marks = sorted(vocabulary.marks, key=lambda mark: len(mark[1]), reverse=True)
        self._lines: list[str] = []

    def text(self, start: str) -> str:
        """The whole grammar, which begins with the expression `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])

    def literal(self, text: str) -> str:
        """Just this text."""
        return " ".join(self._pieces(text))

    def rule(self, expression: str) -> str:
        return self._named(f"r{len(self._lines)}", expression)

    def terminal(self, expression: str) -> str:
        """A lexeme: it is as long as it can be, and holds no special token."""
        return self._named(f"T{len(self._lines)}", expression)

    def json(self, schema: dict[str, Any]) -> str:
        """JSON by a schema. References begin at its own root."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def free(self, *without: str) -> str:
        """Any text that none of these stands in."""
        return self.terminal(" & ".join([ANY, *(f"~({ANY} {quoted(one)} {ANY})" for one in without)]))

    def before(self, text: str, mark: str) -> str:
        """The terminal `text`, in which `mark` does not stand, and then the mark.

        As bytes it belongs to the lexeme, which would not know else where it ends.
        """
        first, *rest = self._pieces(mark)
        joined = [self.terminal(f"{text} {first}")] if first.startswith('"') else [text, first]
        return " ".join([*joined, *rest])

    def marks_but(self, text: str, ends: Collection[int]) -> str:
        """Any special token, but for those that `text` has, and `ends`; empty when there is none."""
        found = [token for token, mark in self._marks if mark not in text and token not in ends]
        return f"<[{','.join(_ranges(found))}]>" if found else ""

    def _pieces(self, text: str) -> list[str]:
        for token, mark in self._marks:
            before, found, after = text.partition(mark)
            if found:
                return [*self._pieces(before), f"<[{token}]>", *self._pieces(after)]
        return [quoted(text)] if text else []

    def _named(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name


def _ranges(tokens: Collection[int]) -> list[str]:
    """Tokens in a row are one range; some models have thousands."""
    runs = groupby(enumerate(sorted(tokens)), lambda pair: pair[1] - pair[0])
    rows = [[token for _, token in run] for _, run in runs]
    return [f"{row[0]}-{row[-1]}" for row in rows]


def one_of(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
