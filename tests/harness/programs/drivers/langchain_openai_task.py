"""LangChain: chat completions, and responses."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Sure(BaseModel):
    """Whether it is sure."""

    sure: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "22 C"


def task(chat: ChatOpenAI) -> dict[str, object]:
    text = "".join(chunk.text for chunk in chat.stream("hi"))
    with_tool, asked = chat.bind_tools([get_weather]), HumanMessage("hi")
    called = with_tool.invoke([asked])
    (call,) = called.tool_calls
    answer = with_tool.invoke([asked, called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])])
    form = chat.with_structured_output(Sure, method="json_schema").invoke("hi")
    return {"stream": text, "city": call["args"]["city"], "answer": answer.text, "form": form.model_dump()}


where = {"base_url": f"{url}/v1", "api_key": "none", "model": model}
print(json.dumps({
    "chat completions": task(ChatOpenAI(**where)),
    "responses": task(ChatOpenAI(**where, use_responses_api=True)),
}))  # fmt: skip
