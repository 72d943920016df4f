"""Libraries, each of which runs a script of `drivers/` with its own Python or node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.harness.programs.program import Program, Run, Told

DRIVERS = Path(__file__).parent / "drivers"


def _driven(driver: str) -> Callable[[Run], Told]:
    def task(run: Run) -> Told:
        script = Path(shutil.copy(DRIVERS / driver, run.work))
        if script.suffix == ".mjs":
            (run.work / "node_modules").symlink_to(run.place / "node_modules")
            line = ["node", str(script)]
        else:
            line = [run.command("python"), str(script)]
        told: Told = json.loads(run.output([*line, run.url, run.model]).splitlines()[-1])
        return told

    return task


LIBRARIES = (
    Program("OpenAI", ("openai",), _driven("openai_task.py")),
    Program("OpenAI npm", ("openai",), _driven("openai_task.mjs"), is_npm=True),
    Program("Anthropic", ("anthropic",), _driven("anthropic_task.py")),
    Program("Anthropic npm", ("@anthropic-ai/sdk",), _driven("anthropic_task.mjs"), is_npm=True),
    Program("smolagents", ("smolagents[openai]",), _driven("smolagents_task.py")),
    Program("litellm", ("litellm", "mcp"), _driven("litellm_task.py")),
    Program("LangChain", ("langchain-openai",), _driven("langchain_openai_task.py")),
    Program("Pydantic AI", ("pydantic-ai-slim[openai,anthropic]",), _driven("pydantic_ai_task.py")),
    Program("instructor", ("instructor",), _driven("instructor_task.py")),
    Program("OpenAI Agents", ("openai-agents",), _driven("openai_agents_task.py")),
    Program(
        "AI SDK",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        _driven("ai_sdk_task.mjs"),
        is_npm=True,
    ),
)
