"""Command-line programs: `llm`, and coding agents that write a file, each configured as by its users."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.programs.program import Program, ProgramRun, Results

FILE, CONTENT = "hello.py", 'print("hello")\n'
TASK = f"Write {FILE}, which prints hello."


def _file_was_written(run: ProgramRun) -> bool:
    path = run.home / FILE
    return path.is_file() and path.read_text(encoding="utf-8").strip() == CONTENT.strip()


def llm(run: ProgramRun) -> Results:
    """Simon Willison's llm, with its models in a file."""
    known = {"model_id": "here", "model_name": run.model, "api_base": f"{run.url}/v1", "supports_tools": True,
             "supports_schema": True}  # fmt: skip
    (run.home / "extra-openai-models.yaml").write_text(json.dumps([known]), encoding="utf-8")
    environment = {"LLM_USER_PATH": str(run.home), "OPENAI_API_KEY": "none"}
    line = [run.command("llm"), "-m", "here", "hi"]
    tool = "def get_weather(city: str) -> str:\n    return '22 C'"
    log = json.loads(run.output([*line, "--schema", "sure bool"], **environment))
    text = run.output([*line, "--functions", tool, "--td"], **environment)
    return {
        "chat completions": {
            "stream": run.output(line, **environment).strip(),
            "answer": text.strip().removeprefix("I look.").strip(),
            "form": log,
        }
    }


def aider(run: ProgramRun) -> Results:
    """aider, which edits by text and uses no tools."""
    settings = {"OPENAI_API_BASE": f"{run.url}/v1", "OPENAI_API_KEY": "none"}
    flags = "--yes-always --no-git --no-check-update --no-analytics --no-show-model-warnings --edit-format whole"
    line = [run.command("aider"), *flags.split(), "--model", f"openai/{run.model}", "--message", TASK, FILE]
    run.output(line, **settings)
    return {"chat completions": {"file": _file_was_written(run)}}


def codex(run: ProgramRun) -> Results:
    """OpenAI's Codex: responses."""
    provider: dict[str, Any] = {"name": "outrider", "base_url": f"{run.url}/v1", "wire_api": "responses"}
    given = ", ".join(f'{key} = "{value}"' for key, value in provider.items())
    settings = [f"model_providers.outrider={{{given}}}", 'model_provider="outrider"', f'model="{run.model}"']
    line = [run.command("codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    run.output([*line, *(word for one in settings for word in ("-c", one)), TASK])
    return {"responses": {"file": _file_was_written(run)}}


def claude_code(run: ProgramRun) -> Results:
    """Anthropic's Claude Code: messages."""
    settings = {
        "ANTHROPIC_BASE_URL": run.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": run.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": run.model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip
    run.output([run.command("claude"), "-p", TASK, "--permission-mode", "acceptEdits"], **settings)
    return {"messages": {"file": _file_was_written(run)}}


def qwen_code(run: ProgramRun) -> Results:
    """Qwen Code, a relative of Gemini's: chat completions."""
    settings = {"OPENAI_BASE_URL": f"{run.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": run.model}
    run.output([run.command("qwen"), "--auth-type", "openai", "--yolo", "-p", TASK], **settings)
    return {"chat completions": {"file": _file_was_written(run)}}


def opencode(run: ProgramRun) -> Results:
    """opencode: chat completions, by the AI SDK."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{run.url}/v1", "apiKey": "none"},
        "models": {run.model: {"name": run.model}},
    }
    settings = {"provider": {"outrider": provider}, "permission": {"edit": "allow"}, "autoupdate": False}
    (run.home / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    run.output([run.command("opencode"), "run", "--model", f"outrider/{run.model}", TASK])
    return {"chat completions": {"file": _file_was_written(run)}}


def continue_cli(run: ProgramRun) -> Results:
    """Continue's CLI: chat completions, by OpenAI's client."""
    model = {"name": run.model, "provider": "openai", "model": run.model, "apiBase": f"{run.url}/v1", "apiKey": "none"}
    settings = {"name": "here", "version": "0.0.1", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    (run.home / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    line = [run.command("cn"), "--config", "config.yaml", "--auto", "-p", TASK]
    run.output(line, CONTINUE_TELEMETRY_ENABLED="0")
    return {"chat completions": {"file": _file_was_written(run)}}


def cline(run: ProgramRun) -> Results:
    """Cline's CLI: chat completions, by the AI SDK."""
    provider = ["--provider", "openai-compatible"]
    given = ["--apikey", "none", "--modelid", run.model, "--baseurl", f"{run.url}/v1"]
    run.output([run.command("cline"), "auth", *provider, *given])
    run.output([run.command("cline"), *provider, "--model", run.model, TASK])
    return {"chat completions": {"file": _file_was_written(run)}}


def pi(run: ProgramRun) -> Results:
    """pi, with each of its APIs."""
    urls = {"openai-completions": f"{run.url}/v1", "openai-responses": f"{run.url}/v1", "anthropic-messages": run.url}
    model = {"id": run.model, "contextWindow": 1_000_000, "maxTokens": 1000}
    providers = {api: {"baseUrl": url, "api": api, "apiKey": "none", "models": [model]} for api, url in urls.items()}
    folder = run.home / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": providers}), encoding="utf-8")
    results = {}
    for api in urls:
        (run.home / FILE).unlink(missing_ok=True)
        line = [run.command("pi"), "--provider", api, "--model", run.model, "--no-session", "-p", TASK]
        run.output(line, PI_OFFLINE="1")
        results[api.partition("-")[2].replace("comp", "chat comp")] = {"file": _file_was_written(run)}
    return results


AGENTS = (
    Program("llm", ("llm",), llm),
    Program("aider", ("aider-chat",), aider),
    Program("Codex", ("@openai/codex",), codex, is_npm=True),
    Program("Claude Code", ("@anthropic-ai/claude-code",), claude_code, is_npm=True),
    Program("Qwen Code", ("@qwen-code/qwen-code",), qwen_code, is_npm=True),
    Program("opencode", ("opencode-ai",), opencode, is_npm=True),
    Program("Continue", ("@continuedev/cli",), continue_cli, is_npm=True),
    Program("Cline", ("cline",), cline, is_npm=True),
    Program("pi", ("@mariozechner/pi-coding-agent",), pi, is_npm=True),
)
