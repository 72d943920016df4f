"""Converts the requests of all APIs to common types: messages, tools, output format, sampling parameters.

Messages and tools take the form that chat templates expect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.grammar.compiler import as_part, check_grammar
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import MAX_SEED, Grammar, SamplingParams
from outrider.server.model.call_grammar import Rules, arguments_of, drop_unreadable, one_of, write_calls
from outrider.server.model.served import ServedModel, ThinkingMode, TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import ToolFormat, replace_lone_surrogates
from outrider.server.problems import Problem
from outrider.server.schemas import ContentPart, Function, Generation, JsonObject, Sampling

RANDOM_SEED_RANGE = 2**32
_CONVERTED_FIELDS = {"max_tokens", "stop", "logprobs", "grammar"}
_COPIED_FIELDS = {one.name for one in dataclasses.fields(SamplingParams)} - _CONVERTED_FIELDS
"""Fields of SamplingParams that a request may have under the same names."""

_TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
_LINE_BREAKS = r"/\n{0,2}/"
_ANY_TOKENS = "<[*]>*"


def join_text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """Returns a message's content as one text, with its parts concatenated. Parts may have any API's name for text.

    Raises:
        Problem: a part has no text, or is for example an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type not in _TEXT_TYPES:
            raise Problem(f"{where}: parts of type {part.type[:40]!r} are not supported; expected text", where)
        if part.text is None:
            raise Problem(f"{where}: a part of type {part.type!r} has no text; expected its text as 'text'", where)
        texts.append(part.text)
    return "".join(texts)


def past_tool_call(name: str, arguments: str | JsonObject, own_id: str | None) -> dict[str, Any]:
    """Returns an earlier tool call. Its arguments become an object, which templates expect."""
    function = {"name": name, "arguments": parse_arguments(arguments)}
    return {"type": "function", "id": own_id or "", "function": function}


def assistant_message(content: str, calls: list[dict[str, Any]], thought: str = "") -> dict[str, Any]:
    """Returns an assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought
    return message


def tool_result(content: str, own_id: str, name: str | None) -> dict[str, Any]:
    """Returns a tool's result."""
    return {"role": "tool", "content": content, "tool_call_id": own_id, **({"name": name} if name else {})}


def parse_arguments(arguments: str | JsonObject) -> JsonObject:
    """Parses JSON arguments. What is no object, such as a call that was cut off, becomes the only entry of one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
            arguments = json.loads(replace_lone_surrogates(text))
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def template_keywords(explicit: JsonObject | None, **named: Any) -> JsonObject:
    """Returns the chat template's keywords: those of `named` that are not None, and the entries of
    `chat_template_kwargs`, which have priority."""
    return {**{name: value for name, value in named.items() if value is not None}, **(explicit or {})}


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """A parsed `tool_choice`. `names`: the tools that may be called, None: all. `single`: at most one call."""

    kind: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None
    single: bool = False


def select_tools(model: ServedModel, tools: Sequence[Function], choice: ToolSelection) -> Toolbox:
    """Returns the tools that an answer may call, in OpenAI's format; the model sees only these.

    Raises:
        Problem: the model can't call tools, two have the same name, or a required one is missing.
    """
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise Problem("tools: two have the same name; expected different names", "tools")
    for name in choice.names or ():
        if name not in by_name:
            raise Problem(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    allowed = tools if choice.names is None else [by_name[name] for name in dict.fromkeys(choice.names)]
    if choice.kind == "required" and not allowed:
        raise Problem("tool_choice requires a call, but there are no tools", "tool_choice")
    if choice.kind == "none" or not allowed:
        return Toolbox()
    if model.tools is None:
        raise Problem(f"{model.id} has no template or no format for calling tools; leave tools out", "tools")
    strict = frozenset(tool.name for tool in allowed if tool.strict)
    return Toolbox(
        tuple(map(to_openai_tool, allowed)), choice.kind == "required", choice.single, strict, model.tools_as_text
    )


def to_openai_tool(tool: Function) -> JsonObject:
    """Returns a tool in OpenAI's format, as chat templates expect it."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    return {"type": "function", "function": function}


def derive_seed(seed: int, index: int) -> int:
    """Derives a choice's seed from the request's seed and the choice's index. Choice 0 has the request's seed."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def to_sampling_params(
    model: ServedModel,
    payload: Generation,
    max_tokens: int,
    stop: str | Sequence[str] | None,
    grammar: Grammar | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    """Returns the parameters of a request, with a seed. Omitted values come from the model's generation_config.json, or
    else are Outrider's defaults.

    Raises:
        InvalidRequest: a value is out of range.
    """
    fields: dict[str, Any] = {**model.defaults, **payload.model_dump(include=_COPIED_FIELDS, exclude_none=True)}
    if payload.temperature is not None:
        fields["temp"] = payload.temperature
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    fields.setdefault("seed", secrets.randbelow(RANDOM_SEED_RANGE))
    fields |= {"max_tokens": max_tokens, "stop": stop or (), "grammar": grammar, "logprobs": logprobs}
    biases = fields.get("logit_bias", {}).items()  # by token ids as strings
    fields["logit_bias"] = {int(key) if re.fullmatch("[0-9]{1,20}", key) else key: bias for key, bias in biases}
    return SamplingParams(**fields)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`param` is the request's field. `loose`: the grammar may omit parts of the schema that it can't enforce; then
    `checked` is the schema, as JSON, for a check after generation."""

    grammar: Grammar
    param: str
    loose: bool = False
    checked: str | None = None


def get_output_format(payload: Sampling) -> OutputFormat | None:
    """Returns the format of a chat or text completion.

    Raises:
        Problem: there are several, or one is invalid.
    """
    guided = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
    fields = ("grammar", "ebnf", "regex", "json_schema", *guided)
    given = {name: getattr(payload, name) for name in fields}
    if payload.structured_outputs is not None:
        nested = payload.structured_outputs.model_dump(by_alias=True)
        given |= {f"structured_outputs.{name}": value for name, value in nested.items()}
    forms = [_parse_format_field(name, value) for name, value in given.items() if value not in (None, False)]
    if (form := parse_output_format(payload.response_format, "response_format", may_be_loose=True)) is not None:
        forms.insert(0, form)
    if any(form.grammar != forms[0].grammar for form in forms):
        names = " and ".join(form.param for form in forms)
        raise Problem(f"{names} each set the output format; expected one of them", forms[1].param)
    return forms[0] if forms else None


def parse_output_format(given: object, name: str, may_be_loose: bool = False) -> OutputFormat | None:
    """Parses `response_format`, `text.format` or Anthropic's `format`. OpenAI's schemas `may_be_loose`.

    Raises:
        Problem: it is invalid.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise Problem(f"{name}: expected an object", name.partition(".")[0])
    kind = given.get("type", "text")
    if kind == "text":
        return None
    inner = given.get("json_schema")
    described = inner if isinstance(inner, Mapping) else given
    schema = described.get("schema")
    if kind == "json_object":
        return _parse_format_field(name, schema if schema is not None else {"type": "object"})
    if kind != "json_schema":
        raise Problem(f"{name}: {str(kind)[:40]!r} is not supported; expected text, json_object or json_schema", name)
    if schema is None:
        raise Problem(f"{name}: the schema is missing; expected a JSON schema as 'schema'", name)
    loose = may_be_loose and isinstance(schema, Mapping) and described.get("strict") is not True
    return replace(_parse_format_field(name, schema), loose=loose)


def _parse_format_field(name: str, given: Any) -> OutputFormat:
    """Returns the format that the field `name` sets. Its last word is the kind: grammar, regex, choice or schema."""
    with _refuse_invalid(f"{name}:", name):
        match re.split(r"[._]", name)[-1]:
            case "grammar" | "ebnf" | "regex" as kind:
                return OutputFormat(Grammar(kind if kind == "regex" else "grammar", given), name)
            case "choice":
                return OutputFormat(Grammar("regex", "|".join(map(re.escape, given))), name)
            case "object":
                return OutputFormat(Grammar.json_object(), name)
        if not isinstance(given, Mapping | str | bool):
            raise Problem(f"{name}: the schema is not an object; expected a JSON schema", name)
        return OutputFormat(Grammar.json_schema(given), name)


@contextmanager
def _refuse_invalid(subject: str, param: str) -> Iterator[None]:
    """Converts InvalidRequest to Problem, whose message begins with `subject`."""
    try:
        yield
    except InvalidRequest as error:
        raise Problem(f"{subject} {error}", param) from None


def build_answer_grammar(
    model: ServedModel, prompt: TokenizedPrompt, box: Toolbox, form: OutputFormat | None
) -> Grammar | None:
    """Returns the grammar of the whole answer to `prompt`; None if nothing constrains it. It allows thinking, if the
    model has it, and then the format or tool calls.

    Raises:
        Problem: the format or a tool's schema can't be compiled or satisfied.
    """
    if form is None and not box.binds:
        return None
    rules = Rules(model.vocabulary)
    body = _calls_rule(rules, model, box, form) if box.tools else None
    if body is None and (form is None or prompt.thinking_mode is ThinkingMode.NONE):
        return form.grammar if form is not None else None
    answer = {"name": "answer", "lark_grammar": rules.text(f"{_thinking_rule(rules, model, prompt)} {body or '@form'}")}
    inner = [as_part(form.grammar, "form")] if form is not None else []
    param = form.param if form is not None else "tools"
    with _refuse_invalid(f"{param}:", param):
        grammar = Grammar("llguidance", json.dumps({"grammars": [answer, *inner]}, ensure_ascii=False))
        check_grammar(grammar, model.vocabulary)
    return grammar


def resolve_output_format(model: ServedModel, form: OutputFormat | None) -> OutputFormat | None:
    """Returns a format that can be enforced, `checked` if its grammar omits part of the schema. Raises Problem."""
    if form is None:
        return None
    try:
        check_grammar(form.grammar, model.vocabulary)
        return form
    except InvalidRequest as error:
        if form.loose:
            schema = drop_unreadable(json.loads(form.grammar.text))
            if isinstance(options := schema.get("x-guidance", {}), dict):
                schema["x-guidance"] = {**options, "lenient": True}
            lenient = Grammar.json_schema(schema)  # without what the library does not support
            with suppress(InvalidRequest):
                check_grammar(lenient, model.vocabulary)
                return replace(form, grammar=lenient, checked=form.grammar.text)
        raise Problem(f"{form.param}: {error}", form.param) from None


def _calls_rule(rules: Rules, model: ServedModel, box: Toolbox, form: OutputFormat | None) -> str | None:
    """Returns the rule of what may follow thinking if there are tools. None: anything, or only the format."""
    written = model.tools
    if written is None or not (box.binds or form is not None):
        return None
    for function in (tool["function"] for tool in box.tools):
        with _refuse_invalid(f"tools: {function['name'][:80]}:", "tools"):
            check_grammar(Grammar.json_schema(arguments_of(function, function["name"] in box.strict)), model.vocabulary)
    inner = write_calls(rules, written.style, box.tools, box.strict, box.single) if written.style is not None else None
    if box.required:
        return _require_calls(rules, written, inner, box)
    if form is not None:
        return one_of([_require_calls(rules, written, inner, box), "@form"])
    marks = (written.tags.start, *((model.thinking.start,) if model.thinking is not None else ()))
    return _allow_text_and_calls(rules, written, inner, rules.text_without(*marks), box) if inner is not None else None


def _require_calls(rules: Rules, written: ToolFormat, inner: str | None, box: Toolbox) -> str:
    """Allows tool calls only. If their schemas can't be expressed, allows anything that begins like one."""
    start = rules.literal(written.tags.start)
    if inner is None:
        return f"{start} {_ANY_TOKENS}"
    call = rules.rule(f"{start} {inner} {rules.literal(written.tags.end)}")
    one_pair = written.style is not None and written.style.block is not None  # of tags, around all calls
    return call if box.single or one_pair else f"{call} ({_LINE_BREAKS} {call})*"


def _allow_text_and_calls(rules: Rules, written: ToolFormat, inner: str, words: str, box: Toolbox) -> str:
    """Allows text in which every start tag begins a valid call."""
    call = rules.rule(f"{rules.followed_by(words, written.tags.start)} {inner} {rules.literal(written.tags.end)}")
    return one_of([call, words]) if box.single else f"{call}* {words}"


def _thinking_rule(rules: Rules, model: ServedModel, prompt: TokenizedPrompt) -> str:
    if model.thinking is None or prompt.thinking_mode is ThinkingMode.NONE:
        return ""
    start, end = model.thinking.start, model.thinking.end
    words, others = rules.text_without(end), rules.special_tokens_except(end, model.codec.eos)
    rest = f"{f'({words} {others})*' if others else ''} {rules.followed_by(words, end)} {_LINE_BREAKS}"
    thought = rest if prompt.thinking_mode is ThinkingMode.BEGUN else f"({rules.literal(start)} {rest})?"
    return f"{thought} {rules.literal(model.thinking.answer)}"
