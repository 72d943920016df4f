"""Pydantic AI: chat completions, responses, and messages."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]


class Sure(BaseModel):
    sure: bool


async def task(model: Model, form: object) -> dict[str, object]:
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "22 C"

    async with Agent(model).run_stream("hi") as stream:
        text = "".join([part async for part in stream.stream_text(delta=True)])
    answer = await Agent(model, tools=[get_weather]).run("hi")
    told: dict[str, object] = {"stream": text, "city": cities[0], "answer": answer.output}
    if form is not None:
        told["form"] = (await Agent(model, output_type=form).run("hi")).output.model_dump()
    return told


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    claude = AnthropicProvider(base_url=url, api_key="none")
    found = {
        "chat completions": await task(OpenAIChatModel(name, provider=openai), NativeOutput(Sure)),
        "responses": await task(OpenAIResponsesModel(name, provider=openai), NativeOutput(Sure)),
        "messages": await task(AnthropicModel(name, provider=claude), None),
    }
    print(json.dumps(found))


asyncio.run(main())
