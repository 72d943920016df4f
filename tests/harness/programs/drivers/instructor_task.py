"""instructor: JSON by a schema and by a required tool, also streamed in parts."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
ai = OpenAI(base_url=f"{url}/v1", api_key="none")
asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}


class Sure(BaseModel):
    sure: bool


class get_weather(BaseModel):
    """The weather of a city."""

    city: str


by_schema = instructor.from_openai(ai, mode=instructor.Mode.JSON_SCHEMA)
by_tool = instructor.from_openai(ai, mode=instructor.Mode.TOOLS)
parts = list(by_schema.chat.completions.create_partial(response_model=Sure, **asked))
print(json.dumps({"chat completions": {
    "form": by_schema.chat.completions.create(response_model=Sure, **asked).model_dump(),
    "parts": parts[-1].model_dump(),
    "city": by_tool.chat.completions.create(response_model=get_weather, **asked).city,
}}))  # fmt: skip
