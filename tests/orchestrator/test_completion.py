"""The completion scripts in their shells; shells that are not installed are skipped."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess

import pytest

from outrider.orchestrator.cli import COMMANDS, HELP_COMMAND, main

CASES = {
    "outrider ser": {"serve"},
    "outrider serve --draft-dev": {"--draft-device"},
    "outrider serve --draft-device ": {"auto", "cpu"},
    "outrider worker dr": {"draft"},
    "outrider completion ": {"bash", "zsh", "fish"},
    "outrider convert --wei": {"--weights"},
    "outrider fleet sta": {"status"},
    "outrider help gen": {"generate"},
    "outrider verify --model somew": {"somewhere/"},
}
BASH = """
source "$1"
read -ra COMP_WORDS <<<"$2"
[ "${2: -1}" != ' ' ] || COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_outrider
printf '%s\\n' "${COMPREPLY[@]}"
"""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """`script(shell)` returns a file with the output of `outrider completion`, beside a folder named somewhere."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "somewhere").mkdir()

    def written(shell):
        path = folder / ("_outrider" if shell == "zsh" else f"outrider.{shell}")
        with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            assert main(["completion", shell]) == 0
        return path

    return written


def completions(script, *command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=200)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {line.partition("\t")[0] for line in done.stdout.splitlines() if line}


def test_bash_completes(script):
    path = script("bash")
    for line, words in CASES.items():
        assert {word.rstrip("/") for word in completions(path, "bash", "-c", BASH, "bash", str(path), line)} == {
            word.rstrip("/") for word in words
        }, line
    assert completions(path, "bash", "-c", BASH, "bash", str(path), "outrider ") >= set(COMMANDS)


@needs("fish")
def test_fish_completes(script):
    path = script("fish")
    for line, words in CASES.items():
        assert completions(path, "fish", "--no-config", "-c", f"source {path}; complete -C '{line}'") == words, line


@needs("zsh")
def test_zsh_completes(script):
    """zsh completes only in a terminal, so the test reads the line that it has after a tab."""
    path = script("zsh")
    for line in ("outrider serve --draft-dev", "outrider verify --model somew"):
        (word,) = CASES[line]
        assert completed_line(path, line).endswith(word.rstrip("/")), line


def completed_line(path, line: str) -> str:
    """Returns the line that zsh shows after a tab."""
    rc = path.parent / ".zshrc"
    rc.write_text(
        f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit -D -u\n"
        f"show() {{ print -rn -- $'\\n'\"<<$BUFFER>>\"; exit }}; zle -N show; bindkey '^X' show; print -n READY\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(path.parent)
        os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "ZDOTDIR": str(path.parent), "TERM": "dumb"})
    output = b""
    try:
        for marker, word in ((b"READY", line.encode() + b"\t\x18"), (b">>", b"")):
            while marker not in output:
                output += os.read(terminal, 4096)
            os.write(terminal, word) if word else None
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return output.decode().rpartition("<<")[2].partition(">>")[0].strip().removesuffix("/")


@pytest.mark.parametrize("given", [["completion"], ["completion", "csh"]])
def test_missing_or_unknown_shell_prints_one_sentence(capsys, given):
    with pytest.raises(SystemExit):
        main(given)
    assert capsys.readouterr().err.count("\n") == 1


def test_completion_knows_every_command():
    from outrider.orchestrator.cli.completion import build_parser

    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    assert set(commands.choices) == {*COMMANDS, HELP_COMMAND}
