"""Anthropic's client: a stream, its tool runner with and without streaming, JSON by a schema."""

import json
import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

url, model = sys.argv[1:]
claude = Anthropic(base_url=url, api_key="none", max_retries=0)
asked = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


class Sure(BaseModel):
    sure: bool


def task(streamed: bool) -> dict[str, object]:
    cities: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "22 C"

    runner = claude.beta.messages.tool_runner(**asked, tools=[get_weather], stream=streamed)
    return {"answer": runner.until_done().content[0].text, "city": cities[0]}


with claude.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
form = claude.messages.parse(**asked, output_format=Sure).parsed_output
print(json.dumps({
    "messages, tool runner": {"stream": text, **task(False), "form": form.model_dump()},
    "messages, tool runner streamed": task(True),
}))  # fmt: skip
