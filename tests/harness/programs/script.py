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
    match agent:
        case "Continue":
            return "Write", {"filepath": path, "content": CONTENT}
        case "Cline":
            return "editor", {"path": path, "new_text": CONTENT}
        case "pi":
            return "write", {"path": path, "content": CONTENT}
        case "Claude Code":
            return "Write", {"file_path": path, "content": CONTENT}
        case "Qwen Code":
            return "write_file", {"file_path": path, "content": CONTENT}
        case "opencode":
            return "write", {"filePath": path, "content": CONTENT}
    return "exec_command", {"cmd": f"echo '{CONTENT.strip()}' > {path}"}


def _template() -> str:
    """Returns the scripted model's template with the agents before anything else."""
    offered = "{%- set offered = (tools or []) | map(attribute='function.name') | list %}"
    begin = "{% if messages[-1].role == 'tool' %}<|answer|>"
    return offered + TEMPLATE.replace(begin, begin + "".join(f"{{% elif {_SIGNS[one]} %}}<|{one}|>" for one in _SIGNS))
