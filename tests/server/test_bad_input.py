"""Invalid requests get the right status in the API's format, and never a traceback. Needs no cluster."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from outrider import __version__
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.errors import InvalidRequest, PromptTooLong, UnknownDrafter, error_kind, make_error
from outrider.protocol.schema import Origin
from outrider.server.app import build_app
from outrider.server.endpoints import chat, messages, responses
from outrider.server.endpoints.chat import ChatRequest
from outrider.server.endpoints.completions import CompletionRequest
from outrider.server.endpoints.json_route import find_ignored_fields, log_ignored
from outrider.server.endpoints.messages import MessagesRequest
from outrider.server.endpoints.responses import ResponsesRequest
from outrider.server.endpoints.status import DetokenizeRequest
from outrider.server.model.served import ServedModel, TemplateInput, load_served_model
from outrider.server.problems import to_problem
from outrider.server.server_context import OrchestratorClient
from tests.harness.scripted_model import write_scripted

NOBODY = "ipc:///tmp/outrider-test-nobody-serves-this"
CHAT, TEXT, RESPOND, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}
OPENAI_PATHS = {CHAT: CHAT_BODY, TEXT: {"prompt": "x"}, RESPOND: {"input": "x"}}
PATHS = {**OPENAI_PATHS, CLAUDE: {**CHAT_BODY, "max_tokens": 5}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NOT_SUPPORTED = "is not supported; leave it out, or describe"
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_served_model("chatty", write_scripted(tmp_path_factory.mktemp("bad") / "chatty"), ("chatty",))


@pytest.fixture(scope="module")
def ask(chatty: ServedModel) -> Ask:
    return make_ask(chatty)


def make_ask(model: ServedModel, base: str = "http://127.0.0.1:8080", **settings: Any) -> Ask:
    """Returns `ask(path, method="POST", **httpx arguments)`, which sends requests to an application in this process."""
    app = build_app(model, OrchestratorClient(NOBODY), HttpSettings(**settings))

    def ask(path: str, method: str = "POST", **arguments: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(call())

    return ask


def error_message(answer: httpx.Response, anthropic: bool = False) -> str:
    """Returns the message of an error, which has its API's shape and names its request."""
    body = answer.json()
    assert "Traceback" not in answer.text and answer.headers["x-request-id"]
    if anthropic:
        assert body["type"] == "error" and body["request_id"]
        assert set(body["error"]) - {"details"} == {"type", "message"}
        assert set(body["error"].get("details", {})) <= {"error_code"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


MALFORMED_BODIES = {
    "cut": b"{",
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "bytes": b"\xff\xfe",
    "not utf-8": b'{"a": "\xff"}',
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "too large a number": b'{"temperature": 1e999}',
    "too long a number": b'{"seed": ' + b"9" * 100_000 + b"}",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "half a pair": b'{"model": "\\ud800"}',
    "half a pair as bytes": b'{"model": "\xed\xa0\x80"}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", MALFORMED_BODIES.values(), ids=MALFORMED_BODIES)
def test_malformed_body_is_refused(ask: Ask, path: str, body: bytes) -> None:
    answer = ask(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    message = error_message(answer, anthropic=path == CLAUDE)
    assert message and "dictionary" not in message  # a word of Python, as are the names of its classes


@pytest.mark.parametrize("text", [r"\ud83d", r"\ude00", r"\ud83d\n", r"\ud83d\u0041"])
def test_half_of_a_surrogate_pair_is_named(ask: Ask, text: str) -> None:
    """JavaScript writes it if it cuts a text within an emoji."""
    answer = ask(TEXT, content=b'{"prompt": "%s"}' % text.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "has half of a surrogate pair" in error_message(answer)


def test_a_byte_order_mark_before_the_body_is_skipped(ask: Ask) -> None:
    for body, status in ((b'{"prompt": "x"}', 503), (b"", 400)):
        marked, kind = codecs.BOM_UTF8 + body, {"content-type": "application/json"}
        assert ask(TEXT, content=marked, headers=kind).status_code == status


WRONG = [
    ({"temprature": 1}, "temprature: no such field"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**4000}, "seed"),
    ({"speculation": {"mode": 7}}, "speculation.mode"),
    ({"speculation": {"mode": "turbo"}}, "speculation.mode"),
    ({"speculation": {"num_draft_tokens": 0}}, "speculation.num_draft_tokens"),
    ({"speculation": {"depth": 7}}, "speculation.depth: no such field"),
    ({"speculation": {"rounds": 1}}, "speculation.rounds"),
    ({"stream": "yes"}, "stream"),
    ({"timeout": 0}, "timeout"),
]


LARGE_BODIES = {
    "wrong tokens": (CompletionRequest, {"prompt": [1.5] * 5000}),
    "tokens and texts": (CompletionRequest, {"prompt": ["a", 1] * 5000}),
    "unknown fields": (CompletionRequest, {"prompt": "x", **{f"f{n}": 1 for n in range(5000)}}),
    "unknown fields below": (CompletionRequest, {"prompt": "x", "speculation": {f"f{n}": 1 for n in range(5000)}}),
    "biases": (CompletionRequest, {"prompt": "x", "logit_bias": {f"f{n}": "x" for n in range(50_000)}}),
    "stops": (CompletionRequest, {"prompt": "x", "stop": [1] * 5000}),
    "messages": (ChatRequest, {"messages": [{"role": "x"}] * 5000}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
    "tools": (ChatRequest, {**CHAT_BODY, "tools": [{}] * 5000}),
    "blocks": (MessagesRequest, {"messages": [{"role": "user", "content": [{}] * 5000}], "max_tokens": 5}),
    "blocks of blocks": (MessagesRequest, {"system": [{"type": "text", "content": [{}] * 500}] * 500, "max_tokens": 5}),
    "items": (ResponsesRequest, {"input": [{"content": 5}] * 5000}),
    "ids": (DetokenizeRequest, {"tokens": ["x"] * 5000}),
}


@pytest.mark.parametrize(("kind", "body"), LARGE_BODIES.values(), ids=LARGE_BODIES)
def test_errors_of_a_large_body_are_limited(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Formatting them delays all other answers: a million errors took half a minute."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 10


def schema(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": inner}}


WRONG_FOR_CHAT_AND_COMPLETIONS = [
    ({"n": 1000}, "n: "),
    ({"n": 0}, "n: "),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 5000}, "stop"),
    ({"logit_bias": {"a": 1, "7": 2, "b": 3}}, "logit_bias token is 'a'; expected a whole number"),
    ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias token is '{'9' * 40}"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"choice": ["x"]}, "json_schema": {}}, "expected one of them"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"response_format": {"type": "yaml"}}, "response_format: 'yaml' is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format: the schema is missing"),
    ({"response_format": schema({"type": "nonsense"})}, "response_format: the JSON schema can't be used: Invalid type"),
    ({"response_format": schema(False)}, "response_format: the JSON schema can't be used: Unsatisfiable"),
    ({"response_format": schema([1])}, "response_format: the schema is not an object"),
    ({"response_format": schema({"x-guidance": None})}, "response_format: the JSON schema can't be used: invalid type"),
    ({"response_format": schema({}), "ignore_eos": True}, "ignore_eos and a grammar can't be used together"),
    ({"grammar": "root ::= x"}, "grammar: the grammar can't be used"),
    ({"grammar": ""}, "grammar: the grammar is empty"),
    ({"guided_regex": "(?=a)b"}, "guided_regex: the regular expression can't be used"),
    ({"structured_outputs": {"json": {}}, "guided_json": {"type": "null"}}, "expected one of them"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_invalid_field_is_refused_by_every_api(ask: Ask, path: str, wrong: dict[str, Any], words: str) -> None:
    answer = ask(path, json={**PATHS[path], **wrong})
    assert answer.status_code == 400 and words in error_message(answer, anthropic=path == CLAUDE)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        (CHAT, {"stop": ["s"] * 5000}, "stop: List should have at most 32 items"),
        (RESPOND, {"input": []}, "input: List should have at least 1 item"),
        (TEXT, {"prompt": ["x"] * 129}, "prompt: List should have at most 128 items"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages.0.content.0.type: Field required",
        ),
        (CHAT, {"stop": 5}, "stop: "),
    ],
)
def test_validation_error_names_the_field_of_the_intended_alternative(
    ask: Ask, path: str, wrong: dict[str, Any], words: str
) -> None:
    """Not the first alternative that fails, under pydantic's name for it."""
    assert error_message(ask(path, json={**PATHS[path], **wrong})).startswith(words)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("wrong", "words"), WRONG_FOR_CHAT_AND_COMPLETIONS)
def test_invalid_field_is_refused_by_chat_and_completions(
    ask: Ask, path: str, wrong: dict[str, Any], words: str
) -> None:
    answer = ask(path, json={**PATHS[path], **wrong})
    assert answer.status_code == 400 and words in error_message(answer)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url' are not supported"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'text' has no text"),
        (CHAT, {**CHAT_BODY, "tool_choice": "required"}, "requires a call, but there are no tools"),
        (CHAT, {**CHAT_BODY, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
        (CHAT, {**CHAT_BODY, "tools": [{"type": "web_search"}]}, f"tools.0.type: 'web_search' {NOT_SUPPORTED}"),
        (CHAT, {**CHAT_BODY, "tools": [{"type": "function", "name": "f"}]}, "tools.0.function: Field required"),
        (
            CHAT,
            {**CHAT_BODY, "tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            f"tool_choice.type: 'custom' {NOT_SUPPORTED}",
        ),
        (CHAT, {**CHAT_BODY, "max_tokens": 5, "max_completion_tokens": 6}, "expected one of them"),
        (CHAT, {**CHAT_BODY, "top_logprobs": 2}, "needs logprobs: true"),
        (CHAT, {**CHAT_BODY, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**CHAT_BODY, "tools": [TOOL], "response_format": schema(False)}, "Unsatisfiable"),
        (CHAT, {**CHAT_BODY, "tools": [TOOL, TOOL]}, "two have the same name"),
        (CHAT, {**CHAT_BODY, "web_search_options": {}}, "web search is not supported"),
        (TEXT, {"prompt": "x", "logprobs": 1, "echo": True, "stream": True}, "can't be streamed"),
        (CHAT, {**CHAT_BODY, "continue_final_message": True}, "not the assistant's"),
        (CHAT, {**CHAT_BODY, "messages": [{"role": "user", "content": "hi", "prefix": True}]}, "not the assistant's"),
        (CHAT, {**CHAT_BODY, "chat_template_kwargs": {"tools": 1}}, "the chat template keyword"),
        (TEXT, {"prompt": ""}, "the prompt is empty"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt.0: Input should be greater than or equal to 0"),
        (TEXT, {"prompt": ["a", [1, 2**31]]}, "prompt.1.1: Input should be less than or equal to 2147483647"),
        (TEXT, {"prompt": "x", "best_of": 3, "stream": True}, "can't be streamed"),
        (TEXT, {"prompt": "x", "best_of": 1, "n": 2}, "less than n"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
        (TEXT, {"prompt": ["x"] * 100, "n": 2}, "100 prompts"),
        (RESPOND, {"input": "x", "previous_response_id": "resp_1"}, "responses are not stored"),
        (RESPOND, {"previous_response_id": "resp_1"}, "responses are not stored"),
        (RESPOND, {"prompt": {"id": "pmpt_1"}}, "prompts are not stored"),
        (RESPOND, {"input": "x", "background": True}, "no response runs in the background"),
        (RESPOND, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format: the schema is missing"),
        (RESPOND, {"input": "x", "text": {"format": {"type": "json_schema", "schema": False}}}, "Unsatisfiable"),
        (RESPOND, {"input": "x", "top_logprobs": 2}, "top_logprobs"),
        (RESPOND, {"input": [{"type": "computer_call"}]}, "'computer_call'"),
        (RESPOND, {"input": [{"content": "x"}]}, "input.0: the message has no role"),
        (RESPOND, {"input": [{"type": "reasoning", "content": []}]}, "there is no message to answer"),
        (RESPOND, {"input": "x", "tools": [TOOL]}, "tools.0: the function has no name; expected it next to its type"),
        (RESPOND, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "set the client's store to false"),
        (
            RESPOND,
            {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            f"tool_choice.type: 'web_search' {NOT_SUPPORTED}",
        ),
        (
            RESPOND,
            {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            f"tool_choice.tools.0.type: 'mcp' {NOT_SUPPORTED}",
        ),
        (CLAUDE, CHAT_BODY, "max_tokens"),
        (
            CLAUDE,
            {**CHAT_BODY, "max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            f"tools: 'bash_20250124' {NOT_SUPPORTED}",
        ),
        (
            CLAUDE,
            {**CHAT_BODY, "max_tokens": 5, "tools": [{"type": "mcp_toolset", "mcp_server_name": "m"}]},
            f"tools: 'mcp_toolset' {NOT_SUPPORTED}",
        ),
        (
            CLAUDE,
            {**CHAT_BODY, "max_tokens": 5, "mcp_servers": [{"name": "m"}], "tools": [{"type": "mcp_toolset"}]},
            "mcp_servers: MCP servers are not called here",
        ),
        (CLAUDE, {**CHAT_BODY, "max_tokens": 5, "tools": [{"name": "f"}, {"name": "f"}]}, "two have the same name"),
        (CLAUDE, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}, "'image'"),
        (CLAUDE, {**CHAT_BODY, "max_tokens": 5, "output_config": {"format": schema(False)}}, "Unsatisfiable"),
        (CLAUDE, {**CHAT_BODY, "max_tokens": 5, "thinking": {"type": "on"}}, "'enabled', 'adaptive' or 'disabled'"),
        ("/tokenize", {}, "exactly one of content"),
        ("/detokenize", {"tokens": [999999]}, "999999 is not a token id"),
    ],
)
def test_unsupported_features_are_refused(ask: Ask, path: str, body: dict[str, Any], words: str) -> None:
    answer = ask(path, json=body)
    assert answer.status_code == 400 and words in error_message(answer, anthropic=path == CLAUDE)


def test_earlier_response_has_the_code_by_which_clients_send_the_whole_input(ask: Ask) -> None:
    error = ask(RESPOND, json={"input": "x", "previous_response_id": "resp_1"}).json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize("path", PATHS)
def test_unknown_model_method_and_path_and_lost_backend_have_their_status(ask: Ask, path: str) -> None:
    mine = path == CLAUDE
    other = ask(path, json={**PATHS[path], "model": "gpt-5"})
    assert other.status_code == 404 and "'gpt-5' is not served here" in error_message(other, mine)
    assert ask(path, "GET").status_code == 405 and ask(path, "GET").headers["allow"] == "POST"
    silent = ask(path, json=PATHS[path])
    assert silent.status_code == 503 and silent.headers["retry-after"] and error_message(silent, mine)
    assert ask("/v1/nothing").status_code == 404


def test_post_without_json_content_type_is_refused(ask: Ask) -> None:
    """So that a page of another site needs a preflight request before it can post."""
    described = ask("/openapi.json", "GET").json()["paths"]
    posted = [path for path, methods in described.items() if "post" in methods]
    assert set(PATHS) < set(posted)
    for path in posted:
        for kind in ({"content-type": "text/plain"}, {}):
            refused = ask(path, content=b"{}", headers=kind)
            assert refused.status_code == 415 and error_message(refused, path.startswith(CLAUDE))
    assert ask("/health").status_code == 405 and ask("/health").headers["allow"] == "GET, HEAD"


def test_openapi_lists_the_model_names(ask: Ask) -> None:
    shapes = ask("/openapi.json", "GET").json()["components"]["schemas"]
    for shape in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "TokenizeRequest"):
        assert shapes[shape]["properties"]["model"]["anyOf"][0] == {"type": "string", "enum": ["chatty"]}


def test_every_origin_of_a_token_and_every_source_of_a_chain_is_documented(ask: Ask) -> None:
    shapes = ask("/openapi.json", "GET").json()["components"]["schemas"]
    origins = shapes["TokenOrigin"]["properties"]["origin"]["description"]
    assert not [one.name for one in Origin if one.name.lower() not in origins]
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    sources = page.partition("| `source` |")[2].partition("\n")[0]
    assert not [one for one in ("none", "cache", "drafter", "ngram", "head") if f"`{one}`" not in sources]


def test_an_unknown_path_or_method_is_refused(ask: Ask) -> None:
    nowhere, wrong = ask("/v1/v1/models", "GET"), ask(CHAT, "GET")
    assert nowhere.status_code == 404 and "/openapi.json lists them" in error_message(nowhere)
    assert wrong.headers["allow"] == "POST" and "expected POST" in error_message(wrong)


def test_harmless_fields_are_accepted(ask: Ask) -> None:
    """The request is valid: it fails only because no orchestrator runs."""
    more = {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "logprobs": False}
    assert ask(CHAT, json={**CHAT_BODY, **more, "response_format": {"type": "text"}}).status_code == 503
    assert ask(CHAT, json={**CHAT_BODY, "functions": [], "audio": None, "function_call": ""}).status_code == 503
    stored = {"store": True, "include": ["x"], "metadata": {}, "max_tool_calls": 1}
    assert ask(RESPOND, json={"input": "x", **stored}).status_code == 503
    cached = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    fields = {"messages": [{"role": "user", "content": [cached]}], "system": [cached], "max_tokens": 5}
    assert ask(CLAUDE, json={**fields, "metadata": {"user_id": "u"}, "context_management": {}}).status_code == 503


def test_a_refusal_in_the_history_is_text_of_the_assistant(chatty: ServedModel) -> None:
    """A client that changes the server in the middle of a conversation replays what the earlier one wrote."""
    part, text = {"type": "refusal", "refusal": "No."}, {"role": "assistant", "content": "No."}
    for earlier in ({"content": [part]}, {"content": None, "refusal": "No."}, {"content": "No.", "refusal": None}):
        turns = [*CHAT_BODY["messages"], {"role": "assistant", **earlier}, *CHAT_BODY["messages"]]
        asked = ChatRequest.model_validate({"messages": turns})
        assert chat.to_conversation(chatty, asked).messages[1] == text
    items = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "hi"}]
    respond = ResponsesRequest.model_validate({"input": items})
    assert responses.to_conversation(chatty, respond).messages[0] == text


def test_neutral_values_of_other_servers_fields_are_ignored(ask: Ask) -> None:
    """Programs send all samplers that a server has, also those that are off."""
    off = {"mirostat": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "xtc_probability": 0.0, "use_beam_search": False}
    more = {"skip_special_tokens": True, "stop_token_ids": [], "echo": False, "best_of": 1, "extra_body": {}}
    unused = {"mirostat_tau": 5.0, "xtc_threshold": 0.1, "repeat_last_n": 64, "dry_base": 1.75, "typ_p": 1}
    assert ask(CHAT, json={**CHAT_BODY, **off, **unused, **more, "prompt_logprobs": None}).status_code == 503
    assert ask(CLAUDE, json={**PATHS[CLAUDE], **off, "n": 1}).status_code == 503


def test_error_names_the_field_of_a_sampling_parameter(ask: Ask) -> None:
    """Also in an error of the orchestrator, which consists of a class and a sentence."""
    short = ask(TEXT, json={"prompt": "x", "min_tokens": 20, "max_tokens": 5}).json()["error"]
    assert (short["param"], short["message"][:16]) == ("min_tokens", "min_tokens is 20")
    assert to_problem(InvalidRequest("logit_bias has token 5000; expected ids from 0 to 511")).param == "logit_bias"
    assert to_problem(InvalidRequest("the prompt is empty")).param is None


def test_output_format_error_names_its_field(ask: Ask) -> None:
    for name, wrong in (("response_format", schema(False)), ("guided_regex", "(")):
        assert ask(CHAT, json={**CHAT_BODY, name: wrong}).json()["error"]["param"] == name


@pytest.mark.parametrize("path", PATHS)
def test_unknown_field_is_ignored_and_logged_once(
    chatty: ServedModel, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is valid: it fails only because no orchestrator runs."""
    ask = make_ask(chatty)
    for _ in range(3):
        assert ask(path, json={**PATHS[path], "brand_new": {"of": 2027}, "another": None}).status_code == 503
    logged = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert logged == [f"ignored the unknown field 'brand_new' of a request to {path}"]


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (CHAT, {"mirostat": 2}, "would change the answer"),
        (CHAT, {"stop_token_ids": [3]}, "would change the answer"),
        (CHAT, {"random_seed": 0}, "would change the answer"),
        (CHAT, {"skip_special_tokens": False}, "would change the answer"),
        (CHAT, {"extra_body": {"top_k": 5}}, "would change the answer"),
        (CHAT, {"max_output_tokens": 5}, "would change the answer"),
        (TEXT, {"tools": [TOOL]}, "would change the answer"),
        (CLAUDE, {"presence_penalty": 1}, "would change the answer"),
        (RESPOND, {"max_output_token": 5}, "did you mean max_output_tokens?"),
        (CLAUDE, {"tool_choise": {}}, "did you mean tool_choice?"),
        (CHAT, {"maxTokens": 5}, "did you mean max_tokens?"),
        (CHAT, {"TopP": 0.5}, "did you mean top_p?"),
        (TEXT, {"responseFormat": {"type": "json_object"}}, "did you mean response_format?"),
        (CHAT, {"stopSequences": ["x"]}, "would change the answer"),
    ],
)
def test_unsupported_field_that_affects_the_answer_is_refused(
    ask: Ask, path: str, field: dict[str, Any], words: str
) -> None:
    refused = ask(path, json={**PATHS[path], **field})
    assert refused.status_code == 400 and words in error_message(refused, path == CLAUDE)


@pytest.mark.parametrize("path", [CHAT, TEXT, CLAUDE])
def test_a_whole_number_may_be_written_with_a_decimal_point(ask: Ask, path: str) -> None:
    """As Gson, data frames and PHP write integers; JSON Schema takes 5.0 for one."""
    fields = {"max_tokens": 5.0, "top_k": 40.0, "seed": 7.0, "speculation": {"num_draft_tokens": 3.0}}
    assert ask(path, json={**PATHS[path], **fields}).status_code == 503  # valid: only no orchestrator runs
    refused = ask(path, json={**PATHS[path], "max_tokens": 5.5})
    assert refused.status_code == 400 and "max_tokens: Input should be a valid integer" in refused.text


def test_one_request_may_not_exceed_the_concurrent_answers_of_its_key(chatty: ServedModel) -> None:
    ask = make_ask(chatty, max_streams_per_key=3)
    assert ask(CHAT, json={**CHAT_BODY, "n": 3}).status_code == 503  # valid: it fails only because no orchestrator runs
    refused = ask(CHAT, json={**CHAT_BODY, "n": 4})
    assert refused.status_code == 400, "trying again, as after a 429, would not help"
    assert error_message(refused) == "this request asks for 4 answers; expected at most 3 (--max-streams-per-key)"


def test_arguments_of_a_missing_template_are_named() -> None:
    ask = make_ask(load_served_model(str(TINY_TARGET), TINY_TARGET, ()))
    refused = ask(CHAT, json={**CHAT_BODY, "reasoning_effort": "low", "enable_thinking": False})
    assert refused.status_code == 400
    assert error_message(refused).endswith(
        "no chat template that takes enable_thinking, reasoning_effort; leave it out"
    )


def test_the_log_of_unknown_fields_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    logged = set[str]()
    for number in range(1000):
        log_ignored(logged, CHAT, [f"field{number}"])
    assert 0 < len(caplog.records) == len(logged) < 210
    assert find_ignored_fields(CompletionRequest.model_validate({"prompt": "x", "y" * 100_000: 1})) == ["y" * 80]


def test_thread_is_refused_with_the_error_code_anthropic_clients_expect(ask: Ask) -> None:
    """With this code they continue without a thread."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        refused = ask(CLAUDE, json={**PATHS[CLAUDE], "thread": thread})
        assert refused.status_code == 400 and "conversations are not stored" in refused.text
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("path", PATHS)
def test_a_compressed_body_is_refused(ask: Ask, path: str) -> None:
    body, kind = gzip.compress(json.dumps(PATHS[path]).encode()), {"content-type": "application/json"}
    refused = ask(path, content=body, headers={**kind, "content-encoding": "gzip"})
    assert refused.status_code == 415 and "the body is compressed (gzip)" in refused.text
    assert ask(path, json=PATHS[path], headers={"content-encoding": "identity"}).status_code == 503


def test_messages_work_without_v1_too(ask: Ask) -> None:
    """For clients that expect /v1 in their base URL, such as DSPy, and are given a URL without it."""
    assert ask("/messages", json=PATHS[CLAUDE]).status_code == 503  # valid: it fails only because no orchestrator runs
    assert ask("/messages/count_tokens", json=CHAT_BODY).json()["input_tokens"] > 0
    assert error_message(ask("/messages", json=CHAT_BODY), anthropic=True).startswith("max_tokens")


def test_head_is_answered_as_get_without_a_body(ask: Ask) -> None:
    for path in ("/health", "/v1/models", "/v1/models/chatty", "/version"):
        head, whole = ask(path, "HEAD"), ask(path, "GET")
        assert (head.status_code, head.content) == (200, b"") and whole.content
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert ask("/v1/models/gpt-5", "HEAD").status_code == 404 and ask(CHAT, "HEAD").status_code == 405


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/chatty", "/page/style.css"])
def test_refused_method_lists_the_allowed_methods(ask: Ask, path: str) -> None:
    refused = ask(path, "DELETE")
    assert refused.status_code == 405 and refused.headers["allow"] == "GET, HEAD"
    assert error_message(refused).endswith("expected GET, HEAD")
    assert all(ask(path, method).status_code == 200 for method in refused.headers["allow"].split(", "))


def test_embeddings_are_refused_with_the_reason(ask: Ask) -> None:
    for path in ("/v1/embeddings", "/embeddings"):
        refused = ask(path, json={"model": "chatty", "input": "x"})
        assert refused.status_code == 404
        assert "embeddings are not supported: chatty generates text" in error_message(refused)


@pytest.mark.parametrize("base", ["/v1", ""])
def test_an_earlier_response_is_refused_with_the_reason(ask: Ask, base: str) -> None:
    asked = (("resp_1", "GET"), ("resp_1", "DELETE"), ("resp_1/cancel", "POST"), ("resp_1/input_items", "GET"))
    for path, method in (*asked, ("compact", "POST")):
        refused = ask(f"{base}/responses/{path}", method)
        assert refused.status_code == 404
        assert error_message(refused).startswith("nothing is stored or compacted here; send the whole conversation")


def test_a_stored_conversation_is_refused_with_the_reason(ask: Ask) -> None:
    """The sessions of OpenAI's agents create one; dashboards read stored chats."""
    for path in ("/v1/conversations", "/conversations", "/v1/conversations/conv_1/items"):
        refused = ask(path, json={})
        assert refused.status_code == 404 and "nothing is stored" in error_message(refused)
    for path in ("/v1/conversations/conv_1", "/v1/chat/completions/chatcmpl-1", "/v1/chat/completions/c/messages"):
        refused = ask(path, "GET")
        assert refused.status_code == 404 and "nothing is stored" in error_message(refused)


def test_the_version_is_returned(ask: Ask) -> None:
    assert ask("/version", "GET").json() == {"version": __version__}


def test_a_slash_at_the_end_of_a_path_is_ignored(ask: Ask, chatty: ServedModel) -> None:
    """A redirection would name http behind a proxy that ends TLS, and the client would send key and body again."""
    for base in ("", "/v1"):
        assert ask(f"{base}/models/", "GET").json() == ask("/v1/models", "GET").json()
    for path in (*PATHS, "/tokenize", "/metrics", "/docs", "/page"):
        for method in ("GET", "POST"):
            assert ask(f"{path}/", method, json={}).status_code == ask(path, method, json={}).status_code != 307
    assert make_ask(replace(chatty, names=("models/chatty",)))("/v1/models/models/chatty/", "GET").status_code == 200


def test_model_entry_satisfies_openai_and_anthropic_clients(ask: Ask) -> None:
    import anthropic.types
    import openai.types

    entry = ask("/v1/models/chatty", "GET").json()
    assert anthropic.types.ModelInfo.model_validate(entry, strict=False).lifecycle == "active"
    assert openai.types.Model.model_validate(entry).id == "chatty"
    assert entry["max_input_tokens"] == entry["max_model_len"] and "description" not in entry


def test_input_tokens_equal_the_tokenized_conversation(ask: Ask) -> None:
    body = {"input": "x", "instructions": "y", "model": "chatty"}
    counted = ask(f"{RESPOND}/input_tokens", json=body).json()
    talk = [{"role": "system", "content": "y"}, {"role": "user", "content": "x"}]
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": ask("/tokenize", json={"messages": talk}).json()["count"],
    }


def test_tokenize_reads_a_conversation_as_chat_completions_do(ask: Ask) -> None:
    def count(**fields: Any) -> int:
        return int(ask("/tokenize", json={**CHAT_BODY, **fields}).json()["count"])

    assert count(tools=[TOOL], tool_choice="none") == count() < count(tools=[TOOL])
    for path in (CHAT, "/tokenize", "/apply-template"):
        both = ask(path, json={**CHAT_BODY, "continue_final_message": True, "add_generation_prompt": True})
        assert both.status_code == 400 and "can't be used together" in error_message(both)


def test_reasoning_effort_of_every_api_reaches_the_template(chatty: ServedModel) -> None:
    """An entry of chat_template_kwargs has priority over it."""
    turns = [{"role": "user", "content": "hi"}]
    for more, expected in (({}, "low"), ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high")):
        asked = ChatRequest.model_validate({"messages": turns, "reasoning_effort": "low", **more})
        assert chat.to_conversation(chatty, asked).keywords == {"reasoning_effort": expected}
        respond = ResponsesRequest.model_validate({"input": "hi", "reasoning": {"effort": "low"}, **more})
        assert responses.to_conversation(chatty, respond).keywords == {"reasoning_effort": expected}
        config = {"max_tokens": 5, "output_config": {"effort": "low"}}
        message = MessagesRequest.model_validate({"messages": turns, **config, **more})
        assert messages.to_conversation(chatty, message).keywords == {"reasoning_effort": expected}


def test_reasoning_effort_turns_thinking_on_and_none_turns_it_off(chatty: ServedModel) -> None:
    """As in vLLM: many templates have only `enable_thinking`, which has priority."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "<|plain|>"),
        ({"reasoning_effort": "low"}, "<think>"),
        ({"reasoning_effort": "none"}, "<|plain|>"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "<|plain|>"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "<think>"),
    )
    for keywords, ending in cases:
        prompt = chatty.tokenize_conversation(TemplateInput(CHAT_BODY["messages"], keywords=keywords))
        assert chatty.codec.decode(prompt.tokens).endswith(ending)
    opening = replace(chatty, template="{{ messages[0].content }}<think>")
    closed = opening.tokenize_conversation(TemplateInput(CHAT_BODY["messages"], keywords={"reasoning_effort": "none"}))
    assert chatty.codec.decode(closed.tokens) == "hi<think></think>\n\n"


def test_a_deferred_tool_is_offered_last_once_a_result_refers_to_it(chatty: ServedModel) -> None:
    """Claude Code defers its rarer tools, and its ToolSearch returns references to them."""
    names = {"Fetch": True, "Placeholder": True, "Write": None}
    tools = [{"name": name, "input_schema": {"type": "object"}, "defer_loading": late} for name, late in names.items()]
    use = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {"query": "Fetch"}}
    found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    for more, expected in (([], ["Write"]), ([("assistant", use), ("user", found)], ["Write", "Fetch"])):
        turns += [{"role": role, "content": [block]} for role, block in more]
        payload = MessagesRequest.model_validate({"messages": turns, "tools": tools, "max_tokens": 5})
        talk = messages.to_conversation(chatty, payload)
        assert [tool["function"]["name"] for tool in talk.box.tools] == expected
    assert talk.messages[-1] == {"role": "tool", "content": "The tool Fetch can be called now.", "tool_call_id": "1"}


def test_system_turns_add_and_remove_tools(chatty: ServedModel) -> None:
    """Claude Code does so if an MCP server connects or leaves during a conversation."""
    tools = [{"name": name, "input_schema": {"type": "object"}, "defer_loading": name == "Late"} for name in "AB"]
    tools.append({"name": "Late", "input_schema": {"type": "object"}, "defer_loading": True})
    inline = {"type": "tool_definition", "definition": {"name": "New", "input_schema": {"type": "object"}}}
    steps: tuple[tuple[str, Any, list[str]], ...] = (
        ("removal", {"type": "tool_reference", "name": "A"}, ["B"]),
        ("addition", inline, ["B", "New"]),
        ("addition", {"type": "tool_reference", "name": "Late"}, ["B", "New", "Late"]),
        ("removal", {"type": "tool_reference", "name": "New"}, ["B", "Late"]),
        ("addition", {"type": "tool_reference", "name": "A"}, ["B", "Late", "A"]),
        ("addition", {"type": "tool_reference", "name": "B"}, ["B", "Late", "A"]),
    )
    turns: list[Any] = [*CHAT_BODY["messages"]]
    for kind, tool, expected in steps:
        turns.append({"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]})
        payload = MessagesRequest.model_validate({"messages": turns, "tools": tools, "max_tokens": 5})
        talk = messages.to_conversation(chatty, payload)
        assert [tool["function"]["name"] for tool in talk.box.tools] == expected
    assert list(talk.messages) == CHAT_BODY["messages"]  # the prompt's list of tools is enough
    shell = {"type": "tool_definition", "definition": {"type": "bash_20250124", "name": "bash"}}
    for kind, past, words in (("addition", turns, "bash_20250124"), ("removal", [], "there is no message to answer")):
        turn = {"role": "system", "content": [{"type": f"tool_{kind}", "tool": shell}]}
        refused = make_ask(chatty)(CLAUDE, json={**PATHS[CLAUDE], "messages": [*past, turn]})
        assert refused.status_code == 400 and words in error_message(refused, anthropic=True)


def test_system_turn_with_clear_at_is_hidden_after_the_next_user_message(chatty: ServedModel) -> None:
    tool = {"name": "Late", "input_schema": {"type": "object"}, "defer_loading": True}
    blocks = [
        {"type": "text", "text": "Be brief."},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Late"}},
    ]
    turns = [*CHAT_BODY["messages"], {"role": "system", "content": blocks, "clear_at": "next_user_message"}]
    answered = [*turns, {"role": "assistant", "content": "Yes."}]
    for shown, is_seen in ((turns, True), (answered, True), ([*answered, *CHAT_BODY["messages"]], False)):
        payload = MessagesRequest.model_validate({"messages": shown, "tools": [tool], "max_tokens": 5})
        talk = messages.to_conversation(chatty, payload)
        assert any("Be brief." in message["content"] for message in talk.messages) is is_seen
        assert [tool["function"]["name"] for tool in talk.box.tools] == ["Late"]
    kept = {"messages": [{**turns[1], "clear_at": "never"}, turns[0]], "tools": [tool], "max_tokens": 5}
    never = MessagesRequest.model_validate(kept)
    assert messages.to_conversation(chatty, never).messages[0]["content"].startswith("Be brief.")


@pytest.mark.parametrize("more", [{}, {"content": []}, {"content": ""}])
def test_last_effort_of_system_turns_applies_and_their_empty_texts_are_left_out(
    chatty: ServedModel, more: dict[str, Any]
) -> None:
    efforts = [{"role": "system", "output_config": {"effort": effort}, **more} for effort in ("low", "max")]
    whole = [*CHAT_BODY["messages"], efforts[0], {"role": "assistant", "content": "Yes."}, efforts[1]]
    for turns, expected in ((whole[:2], "low"), ([*whole, *CHAT_BODY["messages"]], "max"), (whole[:1], "high")):
        asked = {"messages": turns, "max_tokens": 5, "output_config": {"effort": "high"}}
        talk = messages.to_conversation(chatty, MessagesRequest.model_validate(asked))
        assert talk.keywords == {"reasoning_effort": expected}
        assert all(message["role"] != "system" for message in talk.messages)


def test_a_turn_without_content_is_refused(ask: Ask) -> None:
    for turn in ({"role": "user"}, {"role": "system", "output_config": None}, {"role": "assistant", "content": None}):
        refused = ask(CLAUDE, json={**PATHS[CLAUDE], "messages": [*CHAT_BODY["messages"], turn]})
        assert refused.status_code == 400
        assert error_message(refused, anthropic=True) == "messages.1.content: Field required"


def test_truncation_auto_and_disabled_are_accepted(ask: Ask) -> None:
    for truncation, status in (("auto", 503), ("disabled", 503), ("sometimes", 400)):
        assert ask(RESPOND, json={"input": "x", "truncation": truncation}).status_code == status


def test_metrics_need_no_key_only_on_loopback(chatty: ServedModel) -> None:
    for settings, status in (({}, 200), ({"host": "0.0.0.0"}, 401)):
        assert make_ask(chatty, api_keys=("k",), **settings)("/metrics", "GET").status_code == status


def test_body_over_the_size_limit_is_refused(chatty: ServedModel) -> None:
    ask = make_ask(chatty, max_body_mb=1)
    answer = ask(TEXT, json={"prompt": "x" * 2**21})
    assert answer.status_code == 413 and "larger than 1 MB" in error_message(answer)


def test_far_too_long_prompt_is_refused_without_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = make_ask(load_served_model(str(TINY_TARGET), TINY_TARGET, ()))
    monkeypatch.setattr(TextCodec, "encode", lambda *_: pytest.fail("it was tokenized"))
    for path in PATHS:
        body = json.loads(json.dumps(PATHS[path]).replace('"hi"', '"x"').replace('"x"', json.dumps("x" * 2_000_000)))
        refused = ask(path, json=body)
        words = error_message(refused, path == CLAUDE)
        assert refused.status_code == 400 and "prompt is too long: 2000000" in words and "/" not in words
        assert "this model's maximum context length is 1024 tokens" in words
        assert path == CLAUDE or refused.json()["error"]["code"] == "context_length_exceeded"
    assert ask("/tokenize", json={"content": "x" * 2_000_000}).status_code == 400


def test_api_key_is_required_when_configured(chatty: ServedModel) -> None:
    ask = make_ask(chatty, api_keys=("one", "two"))
    for headers in (
        {},
        {"authorization": "Bearer three"},
        {"x-api-key": "onetwo"},
        {"authorization": "Bearer é".encode()},
    ):
        refused = ask("/v1/models", "GET", headers=headers)
        assert refused.status_code == 401 and "API key" in error_message(refused)
    for headers in ({"authorization": "Bearer one"}, {"x-api-key": "two"}):
        assert ask("/v1/models", "GET", headers=headers).status_code == 200
    assert ask("/health", "GET").status_code == 200
    assert ask(CLAUDE, json={}).json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("localhost.:8080", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("evil.example.:8080", 403),
    ],
)
def test_a_foreign_host_name_is_refused(chatty: ServedModel, host: str, status: int) -> None:
    answer = make_ask(chatty)("/health", "GET", headers={"host": host})
    assert answer.status_code == status
    assert status == 200 or "use localhost, an IP address or --api-key" in answer.json()["error"]["message"]


def test_cors_allows_only_configured_origins(chatty: ServedModel) -> None:
    origin = {"origin": "https://page.example"}
    assert "access-control-allow-origin" not in make_ask(chatty)("/health", "GET", headers=origin).headers
    named = make_ask(chatty, cors_origins=("https://page.example",), api_keys=("k",))
    answer = named("/health", "GET", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    readable = answer.headers["access-control-expose-headers"].split(", ")  # what the clients of both APIs look for
    assert {*readable} == {"x-request-id", "request-id", "retry-after", "x-should-retry"}
    before = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert named(CHAT, "OPTIONS", headers=before).status_code == 200
    local = named(CHAT, "OPTIONS", headers={**before, "access-control-request-private-network": "true"})
    assert (local.status_code, local.headers["access-control-allow-private-network"]) == (200, "true")


def test_an_unexpected_error_is_answered_like_every_other(chatty: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrchestratorClient, "client", lambda *_: 1 // 0)
    failed = make_ask(chatty, cors_origins=("*",))(CHAT, json=CHAT_BODY, headers={"origin": "https://page.example"})
    assert failed.status_code == 500 and error_message(failed).startswith("the server failed to answer this request")
    assert failed.json()["request_id"] == failed.headers["x-request-id"]
    assert failed.headers["access-control-allow-origin"] == "*"


def test_valid_request_id_is_kept(ask: Ask) -> None:
    assert ask("/health", "GET", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert ask("/health", "GET", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_tools_are_refused_for_a_model_without_a_template() -> None:
    ask = make_ask(load_served_model(str(TINY_TARGET), TINY_TARGET, ()))
    for path, tools in ((CHAT, [TOOL]), (CLAUDE, [{"name": "f"}]), (RESPOND, [{"type": "function", "name": "f"}])):
        refused = ask(path, json={**PATHS[path], "tools": tools})
        assert refused.status_code == 400 and "no template" in error_message(refused, path == CLAUDE)


def test_openapi_has_every_path_and_its_errors(ask: Ask) -> None:
    described = json.loads(ask("/openapi.json", "GET").text)
    assert set(described["paths"]) == {
        *PATHS, f"{CLAUDE}/count_tokens", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
        "/apply-template", f"{RESPOND}/input_tokens",
        "/health", "/ready", "/version", "/metrics",
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert not [path for path in described["paths"] if f"{path}`" not in page], "docs/server.md lists all under Paths"
    for path in PATHS:
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(described["paths"][path]["post"]["responses"])
    assert "422" not in json.dumps(described)


def test_docs_page_describes_every_path_and_field(ask: Ask) -> None:
    page, described = ask("/docs", "GET"), ask("/openapi.json", "GET").json()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"] and "<script" not in page.text
    for path, methods in described["paths"].items():
        assert all(f"<h2>{method.upper()} {path}</h2>" in page.text for method in methods)
    for name in described["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page.text
    assert "<code>messages</code></td><td>list of ChatMessage</td><td>required</td>" in page.text
    for row in (
        "<code>temperature</code></td><td>number from 0 to 100</td><td></td>",
        "<code>seed</code></td><td>integer from 0 to 9223372036854775807</td><td></td>",
        "<code>grammar</code></td><td>string</td><td>GBNF, or Lark&#39;s notation</td>",
    ):
        assert row in page.text


def test_openapi_bounds_of_whole_numbers_are_the_ones_that_are_checked(ask: Ask) -> None:
    """FastAPI's own document has floats: 2^63 for 2^63-1, which is refused."""
    seed = ask("/openapi.json", "GET").json()["components"]["schemas"]["ChatRequest"]["properties"]["seed"]["anyOf"][0]
    for bound in (seed["minimum"], seed["maximum"]):
        assert type(bound) is int and ask(CHAT, json={**CHAT_BODY, "seed": bound}).status_code == 503
    assert ask(CHAT, json={**CHAT_BODY, "seed": seed["maximum"] + 1}).status_code == 400


def test_openapi_is_generated_on_first_use(chatty: ServedModel) -> None:
    app = build_app(chatty, OrchestratorClient(NOBODY), HttpSettings())
    assert app.openapi_schema is None
    assert app.openapi() is app.openapi() and "chatty" in json.dumps(app.openapi_schema)


def test_openapi_document_is_valid(ask: Ask) -> None:
    from openapi_spec_validator import OpenAPIV32SpecValidator, validate

    described = ask("/openapi.json", "GET").json()
    assert described["openapi"] == "3.2.0" and "itemSchema" in json.dumps(described)
    validate(described, cls=OpenAPIV32SpecValidator)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "needs an API key"),
        ({"host": "example.com"}, "needs an API key"),
        ({"port": 70000}, "port is 70000"),
        ({"request_timeout": 0}, "request_timeout is 0"),
        ({"max_streams_per_key": 0}, "max_streams_per_key is 0"),
        ({"api_keys": ("a b",)}, "one ASCII word"),
        ({"tls_cert": "x"}, "both --tls-cert and --tls-key"),
        ({"tls_cert": "/no/such", "tls_key": "/no/such"}, "no such file"),
        ({"tls_cert": __file__, "tls_key": __file__}, "expected a certificate and its own key"),
        ({"model_names": ("m", "")}, "name is empty"),
        ({"cors_origins": ("*", "localhost:3000")}, "cors_origin is 'localhost:3000'"),
        ({"cors_origins": ("https://a.example/",)}, "such as https://host:port"),
    ],
)
def test_invalid_http_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        HttpSettings(**settings)


def test_http_settings_round_trip_through_json(tmp_path: Path) -> None:
    from outrider.orchestrator.http_settings import HttpOrder

    settings = HttpSettings(api_keys=("a", "b"), cors_origins=("*",), model_names=("m",))
    order = HttpOrder(settings, "ipc:///x", "m", str(tmp_path), 7)
    assert msgspec.json.decode(msgspec.json.encode(order), type=HttpOrder) == order


def test_unknown_drafter_error_names_the_speculation_field():
    """Only the orchestrator knows the drafters, so the error arrives through its socket, by name."""
    answered = make_error(error_kind(UnknownDrafter("")), "no drafter is called 'x' here; expected draft")
    assert (to_problem(answered).status, to_problem(answered).param) == (400, "speculation")


def test_prompt_without_room_in_the_memory_for_texts_exceeds_the_context_too() -> None:
    """At this code clients shorten their conversation, which is the only remedy."""
    answered = make_error(error_kind(PromptTooLong("")), "the prompt is too long: 9 tokens > 5 maximum")
    assert (to_problem(answered).status, to_problem(answered).code) == (400, "context_length_exceeded")
