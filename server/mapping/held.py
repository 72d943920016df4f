"""What a whole answer is held to: thoughts, where the model has them, then words in a form or calls of tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider.grammar.checking import check
from outrider.grammar.compiler import as_part
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.grammar import Grammar
from outrider.server.mapping.form import Form
from outrider.server.mapping.toolbox import Toolbox
from outrider.server.model.call_grammar import arguments_of, calls
from outrider.server.model.lark import Rules, one_of
from outrider.server.model.served import Prompt, ServedModel, Thoughts
from outrider.server.model.tool_format import ToolFormat
from outrider.server.problems import Refused

_BREAKS = r"/\n{0,2}/"
_ANYTHING = "<[*]>*"


def held(model: ServedModel, prompt: Prompt, box: Toolbox, form: Form | None) -> Grammar | None:
    """The grammar of an answer to `prompt`; None where it may be anything.

    Raises:
        Refused: the form or a tool's schema can't be compiled, or met.
    """
    param = form.param if form is not None else "tools"
    if form is not None:
        _check(model, form.grammar, param)
    rules = Rules(model.vocabulary)
    body = _calls(rules, model, box, form) if box.tools else None
    if body is None and form is None:
        return None
    if body is None and form is not None and prompt.thoughts is Thoughts.NONE:
        return form.grammar
    answer = {"name": "answer", "lark_grammar": rules.text(f"{_thoughts(rules, model, prompt)} {body or '@form'}")}
    inner = [as_part(form.grammar, "form")] if form is not None else []
    try:
        grammar = Grammar("llguidance", json.dumps({"grammars": [answer, *inner]}, ensure_ascii=False))
    except InvalidRequest as error:
        raise Refused(f"{param}: {error}", param) from None
    _check(model, grammar, param)
    return grammar


def settled(model: ServedModel, form: Form) -> Form:
    """`form` as a grammar holds it; `loose` no more where that is all of it. Raises Refused."""
    try:
        check(form.grammar, model.vocabulary)
        return replace(form, loose=False)
    except InvalidRequest as error:
        try:
            lenient = form.leniently
            check(lenient, model.vocabulary)
        except InvalidRequest:
            raise Refused(f"{form.param}: {error}", form.param) from None
        return replace(form, grammar=lenient)


def _calls(rules: Rules, model: ServedModel, box: Toolbox, form: Form | None) -> str | None:
    """What may come behind the thoughts where tools are; None: anything, or the form alone."""
    written = model.tools
    if written is None or not (box.binds or form is not None):
        return None
    for tool in box.tools:
        _check_tool(model, tool["function"], box)
    inner = calls(rules, written.style, box.tools, box.strict, box.one) if written.style is not None else None
    if box.must:
        return _only_calls(rules, written, inner, box)
    if form is not None:
        return one_of([_only_calls(rules, written, inner, box), "@form"])
    marks = (written.tags.start, *((model.thinking.start,) if model.thinking is not None else ()))
    return _text_and_calls(rules, written, inner, rules.free(*marks), box) if inner is not None else None


def _only_calls(rules: Rules, written: ToolFormat, inner: str | None, box: Toolbox) -> str:
    """Calls, or where they can't be held to their schemas what begins like one."""
    start = rules.literal(written.tags.start)
    if inner is None:
        return f"{start} {_ANYTHING}"
    call = rules.rule(f"{start} {inner} {rules.literal(written.tags.end)}")
    return call if box.one or _many(written) else f"{call} ({_BREAKS} {call})*"


def _text_and_calls(rules: Rules, written: ToolFormat, inner: str, words: str, box: Toolbox) -> str:
    """Words, between which a mark is the beginning of a call that its schema allows."""
    call = rules.rule(f"{rules.before(words, written.tags.start)} {inner} {rules.literal(written.tags.end)}")
    return one_of([call, words]) if box.one else f"{call}* {words}"


def _many(written: ToolFormat) -> bool:
    """Whether several calls stand between one pair of marks."""
    return written.style is not None and written.style.block is not None


def _thoughts(rules: Rules, model: ServedModel, prompt: Prompt) -> str:
    if model.thinking is None or prompt.thoughts is Thoughts.NONE:
        return ""
    start, end = model.thinking.start, model.thinking.end
    words, others = rules.free(end), rules.marks_but(end, model.codec.eos)
    rest = f"{f'({words} {others})*' if others else ''} {rules.before(words, end)} {_BREAKS}"
    return rest if prompt.thoughts is Thoughts.BEGUN else f"({rules.literal(start)} {rest})?"


def _check_tool(model: ServedModel, function: dict[str, Any], box: Toolbox) -> None:
    try:
        schema = Grammar.json_schema(arguments_of(function, function["name"] in box.strict))
        check(schema, model.vocabulary)
    except InvalidRequest as error:
        raise Refused(f"tools: of {function['name'][:80]} {error}", "tools") from None


def _check(model: ServedModel, grammar: Grammar, param: str) -> None:
    try:
        check(grammar, model.vocabulary)
    except InvalidRequest as error:
        raise Refused(f"{param}: {error}", param) from None
