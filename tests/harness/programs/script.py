"""The scripted model's answers to coding agents: it writes the requested file by a call of the agent's own tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness.programs.agents import CONTENT, FILE
from tests.harness.scripted_model import END, SCRIPTS, TEMPLATE, Script, write_scripted

WHOLE = "<|whole|>"
AIDER_INSTRUCTION = "file listing"
"""Words by which the model's template recognises aider's instructions."""


def write_model(path: Path, homes: dict[str, Path]) -> Path:
    """Writes a model that can call each agent's tool. `homes`: the folder to write to, by the agent's name."""
    scripts = [_call(tool, _arguments(tool, homes[agent] / FILE)) for agent, tool in _TOOLS.items()]
    whole: Script = (WHOLE, f"{FILE}\n```\n{CONTENT}```\n", END)
    return write_scripted(path, (*SCRIPTS, *scripts, whole), _template(list(_TOOLS.values())))


_TOOLS = {"Claude Code": "Write", "Qwen Code": "write_file", "opencode": "write", "Codex": "exec_command"}


def _arguments(tool: str, path: Path) -> dict[str, Any]:
    match tool:
        case "exec_command":
            return {"cmd": f"echo '{CONTENT.strip()}' > {path}"}
        case "write":
            return {"filePath": str(path), "content": CONTENT}
    return {"file_path": str(path), "content": CONTENT}


def _call(tool: str, arguments: dict[str, Any]) -> Script:
    return (f"<|{tool}|>", f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>", END)


def _template(tools: list[str]) -> str:
    """Returns the scripted model's template with the agents' tools before others."""
    known = f"{{%- set known = (tools or []) | map(attribute='function.name') | select('in', {tools}) | list %}}"
    begin = "{% if messages[-1].role == 'tool' %}<|answer|>{% elif both %}"
    agents = (
        "{% if messages[-1].role == 'tool' %}<|answer|>{% elif known %}<|{{ known[0] }}|>"
        f"{{% elif '{AIDER_INSTRUCTION}' in messages[0].content %}}{WHOLE}{{% elif both %}}"
    )
    return known + TEMPLATE.replace(begin, agents)
