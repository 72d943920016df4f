"""An answer in the shapes of OpenAI's responses API: whole, or as the events of a stream, item by item."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.server.answers import sse
from outrider.server.answers.afterwards import Notes, no_notes
from outrider.server.answers.naming import about
from outrider.server.answers.parts import Part, Said
from outrider.server.answers.probabilities import Speller, Wording
from outrider.server.answers.response_items import Item
from outrider.server.answers.telling import Choice, Told, Waited, Words, timings
from outrider.server.answers.thoughts import Count
from outrider.server.answers.usage import responses_usage
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem
from outrider.server.shapes.base import Object
from outrider.server.shapes.chat import SpelledToken
from outrider.server.shapes.responses import Output, ResponseObject


@dataclass(frozen=True, slots=True)
class Head:
    """What is known before the first word, and what was asked and is told again.

    `thoughts` counts a choice's; `speller`: for log-probabilities, if they are wanted.
    """

    model: str
    seed: int
    prompt_tokens: int
    thoughts: Count
    notes: Sequence[str]
    tool_choice: str | Object
    tools: list[Object]
    parallel: bool
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    speller: Speller | None = None
    checked: Notes = no_notes
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def shape(self, output: list[Output], **more: Any) -> ResponseObject:
        return ResponseObject(
            id=self.id,
            created_at=self.created_at,
            model=self.model,
            output=output,
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel,
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=self.tool_choice,
            tools=self.tools,
            **more,
        )


def response(head: Head, choice: Choice, items: list[Output] | None = None) -> ResponseObject:
    """The whole answer; `items` are those that a stream has told already."""
    cut = choice.finish == "length"
    state = "incomplete" if cut else "completed"
    made = items if items is not None else _items(head, choice, state)
    return head.shape(
        made,
        status=state,
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        usage=responses_usage(head.prompt_tokens, choice, head.thoughts),
        timings=timings(choice.timings),
        outrider=about(choice.result, head.seed, [*head.notes, *head.checked([choice])]),
    )


def _items(head: Head, choice: Choice, state: str) -> list[Output]:
    wording = Wording(head.speller) if head.speller is not None else None
    if wording is not None:
        wording.take(choice.extras.logprobs)
    return [Item(part, state, wording).whole() for part in choice.parts]


class Events:
    """One stream's; each event has its number."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._wording = Wording(head.speller) if head.speller is not None else None
        self._number = -1
        self._items: list[Output] = []
        self._item: Item | None = None

    def begin(self) -> bytes:
        """response.created; items follow, and response.completed or response.incomplete with the whole answer."""
        begun = self._head.shape([], status="in_progress").model_dump()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def of(self, one: Words) -> bytes:
        match one:
            case Waited(note=note):
                return sse.comment(note)
            case Told(part=part, extras=extras):
                if self._wording is not None:
                    self._wording.take(extras.logprobs)
                return b"".join(self._grown(part))
            case Choice():
                before = b"".join(self._closed("incomplete" if one.finish == "length" else "completed"))
                answer = response(self._head, one, self._items)
                return before + self._event(f"response.{answer.status}", response=answer.model_dump())

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        """An error in the middle of the stream: the whole answer is one that failed."""
        error = {"code": problem.code or "server_error", "message": problem.message}
        answer = self._head.shape(self._items, status="failed", error=error)
        return self._event("response.failed", response=answer.model_dump())

    def _grown(self, part: Part) -> Iterator[bytes]:
        if self._item is None or type(self._item.part) is not type(part) or isinstance(part, ToolCall):
            yield from self._closed("completed")
            self._item = Item(part, "in_progress", self._wording)
            rows = self._item.rows
            yield from self._begun(self._item)
        else:
            rows = self._item.grow(part)
        yield self._delta(self._item, part, rows)

    def _begun(self, item: Item) -> Iterator[bytes]:
        at = len(self._items)
        yield self._event("response.output_item.added", output_index=at, item=item.empty().model_dump())
        if not isinstance(item.part, ToolCall):
            yield self._event(
                "response.content_part.added", item_id=item.id, output_index=at, content_index=0, part=item.content("")
            )

    def _delta(self, item: Item, part: Part, rows: list[SpelledToken]) -> bytes:
        at: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items)}
        if isinstance(part, ToolCall):
            return self._event("response.function_call_arguments.delta", **at, delta=part.arguments)
        more = {"logprobs": _plain(rows)} if isinstance(part, Said) else {}
        return self._event(f"response.{item.word}.delta", **at, content_index=0, delta=part.text, **more)

    def _closed(self, state: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        item.status = state
        at: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items)}
        if isinstance(item.part, ToolCall):
            yield self._event(
                "response.function_call_arguments.done", **at, name=item.part.name, arguments=item.part.arguments
            )
        else:
            more = {"logprobs": _plain(item.rows)} if isinstance(item.part, Said) else {}
            yield self._event(f"response.{item.word}.done", **at, content_index=0, text=item.part.text, **more)
            yield self._event("response.content_part.done", **at, content_index=0, part=item.content(item.part.text))
        whole = item.whole()
        yield self._event("response.output_item.done", output_index=len(self._items), item=whole.model_dump())
        self._items.append(whole)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        body = {"type": kind, "sequence_number": self._number, **fields}
        return sse.event(json.dumps(body, ensure_ascii=False), kind)


def _plain(rows: Sequence[SpelledToken]) -> list[Object]:
    return [row.model_dump() for row in rows]
