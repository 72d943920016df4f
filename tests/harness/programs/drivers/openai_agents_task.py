"""OpenAI's Agents SDK: responses, and chat completions."""

import asyncio
import json
import sys

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]


class Sure(BaseModel):
    sure: bool


async def task(model: Model) -> dict[str, object]:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "22 C"

    streamed = Runner.run_streamed(Agent(name="a", model=model), "hi")
    parts = [event.data.delta async for event in streamed.stream_events()
             if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]  # fmt: skip
    answer = await Runner.run(Agent(name="b", model=model, tools=[get_weather]), "hi")
    formed = await Runner.run(Agent(name="c", model=model, output_type=Sure), "hi")
    form = formed.final_output.model_dump()
    return {"stream": "".join(parts), "city": cities[0], "answer": answer.final_output, "form": form}


async def main() -> None:
    set_tracing_disabled(True)
    ai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    found = {
        "responses": await task(OpenAIResponsesModel(model=name, openai_client=ai)),
        "chat completions": await task(OpenAIChatCompletionsModel(model=name, openai_client=ai)),
    }
    print(json.dumps(found))


asyncio.run(main())
