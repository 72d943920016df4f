"""Client libraries, each used by a script of `drivers/` that runs with the library's own Python or with node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.harness.programs.program import Program, ProgramRun, Results

DRIVERS = Path(__file__).parent / "drivers"


def _run_driver(driver: str) -> Callable[[ProgramRun], Results]:
    def task(run: ProgramRun) -> Results:
        script = Path(shutil.copy(DRIVERS / driver, run.home))
        if script.suffix == ".mjs":
            (run.home / "node_modules").symlink_to(run.folder / "node_modules")
            line = ["node", str(script)]
        else:
            line = [run.command("python"), str(script)]
        results: Results = json.loads(run.output([*line, run.url, run.model]).splitlines()[-1])
        return results

    return task


LIBRARIES = (
    Program("OpenAI", ("openai",), _run_driver("openai_task.py")),
    Program("OpenAI npm", ("openai",), _run_driver("openai_task.mjs"), is_npm=True),
    Program("Anthropic", ("anthropic",), _run_driver("anthropic_task.py")),
    Program("Anthropic npm", ("@anthropic-ai/sdk",), _run_driver("anthropic_task.mjs"), is_npm=True),
    Program("smolagents", ("smolagents[openai]",), _run_driver("smolagents_task.py")),
    Program("litellm", ("litellm", "mcp"), _run_driver("litellm_task.py")),
    Program("LangChain", ("langchain-openai",), _run_driver("langchain_openai_task.py")),
    Program("Pydantic AI", ("pydantic-ai-slim[openai,anthropic]",), _run_driver("pydantic_ai_task.py")),
    Program("instructor", ("instructor",), _run_driver("instructor_task.py")),
    Program("OpenAI Agents", ("openai-agents",), _run_driver("openai_agents_task.py")),
    Program(
        "AI SDK",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        _run_driver("ai_sdk_task.mjs"),
        is_npm=True,
    ),
)
