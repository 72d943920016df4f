"""litellm: chat completions, and messages by its Anthropic interface."""

import json
import sys

import litellm
from pydantic import BaseModel

url, model = sys.argv[1:]
HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


class Sure(BaseModel):
    sure: bool


def task(**to: str) -> dict[str, object]:
    parts = litellm.completion(messages=HELLO, stream=True, max_tokens=50, **to)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    message = litellm.completion(messages=HELLO, tools=[TOOL], max_tokens=50, **to).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "22 C"}
    answer = litellm.completion(messages=[*HELLO, message, result], tools=[TOOL], max_tokens=50, **to)
    formed = litellm.completion(messages=HELLO, response_format=Sure, max_tokens=50, **to)
    return {
        "stream": text,
        "city": json.loads(call.function.arguments)["city"],
        "answer": answer.choices[0].message.content,
        "form": json.loads(formed.choices[0].message.content),
    }


print(json.dumps({
    "chat completions": task(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none"),
    "messages": task(model=f"anthropic/{model}", api_base=url, api_key="none"),
}))  # fmt: skip
