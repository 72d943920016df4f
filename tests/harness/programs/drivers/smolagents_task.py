"""smolagents: its model class requires a tool call, streams, and reads a result."""

import json
import sys

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool

url, name = sys.argv[1:]
model = OpenAIServerModel(name, api_base=f"{url}/v1", api_key="none")
hello = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "hi"}])]


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "22 C"


text = "".join(delta.content or "" for delta in model.generate_stream(hello))
(call,) = model.generate(hello, tools_to_call_from=[get_weather]).tool_calls
arguments = call.function.arguments
told = json.loads(arguments) if isinstance(arguments, str) else arguments
print(json.dumps({"chat completions": {"stream": text, "city": told["city"]}}))
