"""The scripted model's answers to coding agents: it writes the requested file by a call of the agent's own tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness.programs.agents import CONTENT, FILE
from tests.harness.scripted_model import END, SCRIPTS, TEMPLATE, Script, write_scripted

_WHOLE: Script = ("<|aider|>", f"{FILE}\n```\n{CONTENT}```\n", END)
_SIGNS = {
    "Continue": "'in the Continue CLI' in messages[0].content",
    "Cline": "'You are Cline' in messages[0].content",
    "pi": "'operating inside pi' in messages[0].content",
    "Claude Code": "'Write' in offered",
    "Qwen Code": "'write_file' in offered",
    "opencode": "'write' in offered",
    "Codex": "'exec_command' in offered",
    "aider": "'file listing' in messages[0].content",
}
"""The conditions by which the model's template recognises agents, in this order: several have a tool `write`."""

_WRITE_TOOLS = {
    "Continue": ("Write", "filepath", "content"),
    "Cline": ("editor", "path", "new_text"),
    "pi": ("write", "path", "content"),
    "Claude Code": ("Write", "file_path", "content"),
    "Qwen Code": ("write_file", "file_path", "content"),
    "opencode": ("write", "filePath", "content"),
}
"""Each agent's tool that writes a file, and the fields of its path and content; Codex writes by a shell's command."""


def write_model(path: Path, homes: dict[str, Path]) -> Path:
    """Writes a model that can call each agent's tool. `homes`: the folder to write to, by the agent's name."""
    calls = [_call(agent, homes[agent] / FILE) for agent in _SIGNS if agent != "aider"]
    return write_scripted(path, (*SCRIPTS, *calls, _WHOLE), _template())


def _call(agent: str, path: Path) -> Script:
    name, arguments = _tool(agent, str(path))
    call = json.dumps({"name": name, "arguments": arguments})
    return (f"<|{agent}|>", f"<tool_call>\n{call}\n</tool_call>", END)


def _tool(agent: str, path: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and arguments of an agent's tool that writes the file."""
    if agent == "Codex":
        return "exec_command", {"cmd": f"echo '{CONTENT.strip()}' > {path}"}
    name, path_field, content_field = _WRITE_TOOLS[agent]
    return name, {path_field: path, content_field: CONTENT}


def _template() -> str:
    """Returns the scripted model's template with the agents before anything else."""
    offered = "{%- set offered = (tools or []) | map(attribute='function.name') | list %}"
    begin = "{% if messages[-1].role == 'tool' %}<|answer|>"
    return offered + TEMPLATE.replace(begin, begin + "".join(f"{{% elif {_SIGNS[one]} %}}<|{one}|>" for one in _SIGNS))
