"""OpenAI's client: chat completions and responses; a stream, a tool and its result, JSON by a schema."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
ai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "hi"}]
city = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
weather = {"name": "get_weather", "parameters": city}


class Sure(BaseModel):
    sure: bool


def chats() -> dict[str, object]:
    asked = {"model": model, "messages": hello}
    parts = ai.chat.completions.create(**asked, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    tools = [{"type": "function", "function": weather}]
    message = ai.chat.completions.create(**asked, tools=tools).choices[0].message
    (call,) = message.tool_calls
    talk = [*hello, message, {"role": "tool", "tool_call_id": call.id, "content": "22 C"}]
    answer = ai.chat.completions.create(model=model, messages=talk, tools=tools).choices[0].message.content
    form = ai.chat.completions.parse(**asked, response_format=Sure).choices[0].message.parsed
    return {
        "stream": text,
        "city": json.loads(call.function.arguments)["city"],
        "answer": answer,
        "form": form.model_dump(),
    }


def responses() -> dict[str, object]:
    asked = {"model": model, "input": "hi"}
    with ai.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    tools = [{"type": "function", **weather}]
    first = ai.responses.create(**asked, tools=tools)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 C"}
    told = [*hello, *(item.model_dump(exclude_none=True) for item in first.output), result]
    answer = ai.responses.create(model=model, input=told, tools=tools).output_text
    form = ai.responses.parse(**asked, text_format=Sure).output_parsed
    return {"stream": text, "city": json.loads(call.arguments)["city"], "answer": answer, "form": form.model_dump()}


print(json.dumps({"chat completions": chats(), "responses": responses()}))
