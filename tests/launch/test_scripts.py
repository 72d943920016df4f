"""The launch scripts, without installing anything: what they call, and their messages if something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ("run_local.sh", "test.sh", "test_fleet.sh", "environment.sh", "mac_check.sh")


@pytest.fixture
def copy(tmp_path):
    """A tree with the scripts, and a .venv whose python tells what it was called with."""
    root = tmp_path / "a tree"
    (root / "launch").mkdir(parents=True)
    for name in SCRIPTS:
        (root / "launch" / name).write_bytes((ROOT / "launch" / name).read_bytes())
    (root / "pyproject.toml").write_text("[project]\n")
    return root


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def with_venv(root):
    """A python that passes every check, prints each install and the last call, and needs no BLAS."""
    executable(
        root / ".venv/bin/python",
        'case "$*" in\n'
        '*"pip install"*) echo "INSTALL $*" >&2 ;;\n'
        '*"-c "*|*"--version"*) exit 0 ;;\n'
        '*) printf "%s|" "$@"; printf "cwd=%s\\n" "$PWD" ;;\n'
        "esac",
    )


def run(root, script, *arguments, path="/usr/bin:/bin", **environment):
    return subprocess.run(
        ["bash", str(root / "launch" / script), *arguments],
        capture_output=True, text=True, timeout=200, cwd="/", env={"PATH": path, "HOME": str(root), **environment},
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_and_use_no_syntax_newer_than_bash_3(script):
    text = (ROOT / "launch" / script).read_text()
    assert subprocess.run(["bash", "-n", str(ROOT / "launch" / script)]).returncode == 0
    for newer in ("declare -A", "mapfile", "readarray", "${!", "|&", "&>>", "local -n", ",,}", "^^}", "coproc"):
        assert newer not in text, f"{newer} is not in bash 3.2"


@pytest.mark.parametrize("flag", [["--prompt", "a b"], ["--prompt=a b"], ["-p", "a b"], ["-pa b"]])
def test_run_local_generates_with_a_prompt_and_serves_without(copy, flag):
    with_venv(copy)
    done = run(copy, "run_local.sh", *flag, "--seed", "1")
    assert done.stdout == "|".join(["-P", "-m", "outrider", "generate", *flag, "--seed", "1", "cwd=/\n"]), done.stderr
    assert run(copy, "run_local.sh", "--mode", "ar").stdout == "-P|-m|outrider|serve|--mode|ar|cwd=/\n"


def test_the_second_start_installs_nothing_until_pyproject_changes(copy):
    """The first one also compiles the modules, whatever the environment says."""
    with_venv(copy)
    first = run(copy, "run_local.sh").stderr
    assert "INSTALL" in first and f"-m|compileall|-q|{copy}/outrider|" in first
    assert run(copy, "run_local.sh").stderr == ""
    (copy / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert "INSTALL" in run(copy, "run_local.sh").stderr


@pytest.mark.parametrize(("environment", "extras"), [({}, "serve,cpu"), ({"OUTRIDER_MLX": "cuda"}, "serve,cuda")])
def test_first_start_installs_the_server_and_the_chosen_mlx_extra(copy, environment, extras):
    with_venv(copy)
    assert f"-e {copy}[{extras}]\n" in run(copy, "run_local.sh", **environment).stderr
    assert run(copy, "run_local.sh", **environment).stderr == ""


def test_test_script_installs_its_extra_which_covers_run_local(copy):
    with_venv(copy)
    done = run(copy, "test.sh", "tests/protocol", "-k", "codec")
    assert f"-e {copy}[test]" in done.stderr
    assert done.stdout == f"-m|pytest|tests/protocol|-k|codec|cwd={copy}\n"
    assert run(copy, "run_local.sh").stderr == ""


def test_test_script_runs_on_a_machine_that_needs_no_blas(copy):
    """As on a Mac, whose Accelerate needs no preloading, nor a choice of kernels."""
    python = copy / ".venv/bin/python"
    with_venv(copy)
    needs_none = "import outrider.orchestrator.machine.system as s; s.blas_environment = lambda base, threads: base"
    python.write_text(
        python.read_text().replace(
            '*"-c "*|',
            f"""*blas_environment*) shift 2; PYTHONPATH={ROOT} exec {sys.executable} -c '{needs_none}; exec("""
            """__import__("sys").argv[1])' "$1" ;;\n*"-c "*|""",
        )
    )
    done = run(copy, "test.sh", "tests/protocol")
    assert done.returncode == 0 and "export" not in done.stderr, done.stderr
    assert done.stdout.startswith("-m|pytest|tests/protocol|")


@pytest.mark.parametrize(("said", "status"), [("no, run pip", 0), ("no, run pip\nTraceback", 1), ("no", 1)])
def test_wheel_check_recognizes_a_refusal_also_with_a_macs_tools(tmp_path, said, status):
    executable(tmp_path / "wc", 'printf \'%8d\\n\' "$(/usr/bin/wc "$@")"')  # BSD's wc indents
    executable(tmp_path / "outrider", f"printf '%s\\n' '{said}'; exit 1")
    text = (ROOT / "launch/check_wheel.sh").read_text()
    refused = text[text.index("refused() {") : text.index("told_what_is_missing() {")]
    done = subprocess.run(
        ["bash", "-euc", f"{refused}\nrefused 'run pip' outrider serve"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert done.returncode == status


def test_fleet_test_script_installs_ray_and_runs_only_fleet_tests(copy):
    with_venv(copy)
    done = run(copy, "test_fleet.sh")
    assert f"-e {copy}[test,fleet]" in done.stderr
    assert done.stdout.startswith("-m|pytest|-m|fleet|") and done.stdout.endswith(f"|tests/fleet|cwd={copy}\n")


@pytest.mark.skipif(shutil.which("dash") is None, reason="needs a shell that is not bash")
@pytest.mark.parametrize(
    ("script", "called"), [("run_local.sh", "-P|-m|outrider|generate|-p|a  b|"), ("test.sh", "-m|pytest|-p|a  b|")]
)
def test_script_can_be_called_with_another_shell(copy, script, called):
    with_venv(copy)
    done = subprocess.run(
        ["dash", script, "-p", "a  b"],
        capture_output=True, text=True, timeout=200, cwd=copy / "launch", env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.startswith(called), done.stderr


@pytest.mark.parametrize("link", ["elsewhere/outrider", "a tree/relative"])
def test_script_can_be_called_through_a_symlink(copy, tmp_path, link):
    with_venv(copy)
    path = tmp_path / link
    path.parent.mkdir(exist_ok=True)
    target = copy / "launch/run_local.sh"
    path.symlink_to(target if "elsewhere" in link else target.relative_to(path.parent))
    (tmp_path / "twice").symlink_to(path)
    for name in (path, tmp_path / "twice"):
        done = subprocess.run(["bash", str(name), "--mode", "ar"], capture_output=True, text=True, cwd="/", timeout=200)
        assert done.stdout == "-P|-m|outrider|serve|--mode|ar|cwd=/\n", done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["-p", "x", "--help"], ["--help", "-p", "x"]])
def test_help_of_run_local_covers_generate_and_serve(copy, arguments):
    with_venv(copy)
    out = run(copy, "run_local.sh", *arguments).stdout
    assert "-P|-m|outrider|generate|--help|" in out and "-P|-m|outrider|serve|--help|" in out
    assert "With --prompt this completes" in out and "Without --prompt it serves" in out


@pytest.fixture
def as_another_user(copy):
    """The tree as one that is looked at by somebody who may write nothing in it."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")

    def start(script, *arguments):
        for path in (copy, *copy.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        for path in (copy.parent, *copy.parent.parents):
            if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                path.chmod(0o755)
        return subprocess.run(
            ["bash", str(copy / "launch" / script), *arguments],
            capture_output=True, text=True, timeout=99, cwd="/", env={"PATH": "/usr/bin:/bin", "HOME": "/"}, user=65534,
        )  # fmt: skip

    return start


def test_other_user_can_start_an_installed_checkout_but_not_install_it(copy, as_another_user):
    with_venv(copy)
    done = as_another_user("run_local.sh")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no permission to write it; ask its owner to start launch/run_local.sh once" in done.stderr
    run(copy, "run_local.sh")
    done = as_another_user("run_local.sh")
    assert (done.stdout, done.stderr) == ("-P|-m|outrider|serve|cwd=/\n", "")


def test_mac_check_shows_progress_preloads_blas_and_writes_a_report(copy, tmp_path):
    executable(
        copy / ".venv/bin/python",
        'case "$*" in\n'
        "*blas_environment*) echo LD_PRELOAD=/lib/such-a-blas.so ;;\n"
        '*"-c "*|*"--version"*|*"pip install"*) exit 0 ;;\n'
        '*survey*) echo "survey: half way" >&2; echo "a table, $LD_PRELOAD"; exit 3 ;;\n'
        '*) echo "on the way" >&2; echo "result" ;;\n'
        "esac",
    )
    report = tmp_path / "report.md"
    done = run(copy, "mac_check.sh", "--quick", "--report", str(report))
    assert done.returncode == 0 and done.stdout == ""
    assert "survey: half way" in done.stderr and done.stderr.count("on the way") > 5
    written = report.read_text()
    assert "a table, /lib/such-a-blas.so" in written and "exit code 3" in written and written.count("exit code 0") > 5
    assert "survey: half way" in written  # of a step that failed, for whoever reads the report
    assert not list(tmp_path.glob("*.stderr"))


def test_mac_check_needs_coremltools(copy, tmp_path):
    with_venv(copy)
    python = copy / ".venv/bin/python"
    python.write_text(python.read_text().replace('*"-c "*|', '*find_spec*) exit 1 ;;\n*"-c "*|'))
    done = run(copy, "mac_check.sh", "--report", str(tmp_path / "report.md"))
    assert done.returncode == 1 and (tmp_path / "report.md").read_text() == ""
    assert "outrider: coremltools is not installed; run rm -r .venv, then PYTHON=python3.13 launch/" in done.stderr


def test_a_failed_installation_is_tried_again(copy):
    with_venv(copy)
    good = (copy / ".venv/bin/python").read_text()
    executable(copy / ".venv/bin/python", 'case "$*" in *"pip install"*) exit 1 ;; esac')
    done = run(copy, "run_local.sh")
    assert done.returncode == 1 and "installation failed" in done.stderr
    (copy / ".venv/bin/python").write_text(good)
    assert "INSTALL" in run(copy, "run_local.sh").stderr


@pytest.mark.parametrize(
    ("version", "system"), [((3, 9, 6), ("Linux", "aarch64")), ((3, 15, 0), ("Darwin", "arm64")),
                            ((3, 13, 2), ("Darwin", "x86_64"))]
)  # fmt: skip
def test_unsupported_python_is_a_one_line_error(copy, tmp_path, version, system):
    """The last is a Python of an Intel Mac, which Rosetta runs."""
    old, named = tmp_path / "old", ".".join(map(str, version))
    for name in ("python3", "python"):
        pretend = f"import platform, sys; sys.version_info = {version}; system = {system}"
        pretend += "; platform.system, platform.machine = lambda: system[0], lambda: system[1]; exec(sys.argv[1])"
        executable(
            old / name,
            f'[ "$1" = --version ] && echo "Python {named}" && exit 0\n'
            f"""[ "$1" = -c ] && exec '{sys.executable}' -c "{pretend}" "$2"\nexit 1""",
        )
    for tool in ("bash", "dirname", "readlink", "cksum", "cat", "uname", "id", "flock"):
        if (found := shutil.which(tool)) is not None:  # macOS has no flock
            (old / tool).symlink_to(found)
    done = run(copy, "run_local.sh", path=str(old))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Python 3.11 to 3.14 is needed (on a Mac for arm64:" in done.stderr
    assert f", and Python {named} is installed; install one" in done.stderr


def test_scripts_take_the_python_versions_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / "launch/environment.sh").read_text()
    low, high = re.findall(r"3, (\d+)", script)[:2]
    assert project["requires-python"] == f">=3.{low},<3.{high}"
    assert f"--python '>=3.{low},<3.14'" in script
    assert any(one.startswith("coremltools") and "python_version < '3.14'" in one for one in project["dependencies"])


def test_ci_tests_with_the_python_that_it_set_up(copy, tmp_path):
    """Not with another one of the runner's system, such as Ubuntu 24.04's python3.12, nor with one that uv finds."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    for name in ("uv", "python", "python3", "python3.12", "python3.13"):
        executable(tmp_path / "tools" / name, f'[ "$1" = -c ] || echo "{name} $*"')
    done = subprocess.run(
        ["bash", "-c", f". '{copy}/launch/environment.sh' && make_venv"],
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin", **workflow.get("env", {})}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == f"python -m venv {copy}/.venv\n"


def test_uv_is_used_when_available(copy, tmp_path):
    with_venv(copy)
    executable(tmp_path / "bin/uv", 'echo "UV $*" >&2')
    done = run(copy, "run_local.sh", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert f"UV pip install --quiet --python {copy}/.venv/bin/python -e {copy}" in done.stderr
    assert "INSTALL" not in done.stderr


def test_uv_that_chooses_a_python_for_intel_is_reported(copy, tmp_path):
    python = copy / ".venv/bin/python"
    executable(tmp_path / "bin/uv", f'mkdir -p "{python.parent}" && ln -s /bin/false "{python}"')
    done = run(copy, "run_local.sh", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (1, "")
    expected = "uv chose a Python for Intel, which MLX does not support; set PYTHON to one for arm64"
    assert done.stderr == f"outrider: {expected}\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is a matter of Linux")
def test_openblas_is_installed_once_by_root_and_only_reported_to_others(copy, tmp_path):
    tools = tmp_path / "tools"
    executable(tools / "apt-get", f'echo "$*" >>{tmp_path}/apt; exit 100')
    python = copy / ".venv/bin/python"
    with_venv(copy)
    python.write_text(
        python.read_text().replace(
            '*"-c "*|', '*blas_notes*) exit 1 ;;\n*NO_OPENBLAS_NOTE*) echo "NO BLAS" >&2 ;;\n*"-c "*|'
        )
    )
    for user, wanted in (("1000", False), ("0", True)):
        executable(tools / "id", f"echo {user}")
        done = run(copy, "run_local.sh", path=f"{tools}:/usr/bin:/bin")
        assert "NO BLAS" in done.stderr and done.stdout.startswith("-P|-m|outrider|serve|")
        assert os.path.exists(tmp_path / "apt") is wanted
    tried = (tmp_path / "apt").read_text()
    run(copy, "run_local.sh", path=f"{tools}:/usr/bin:/bin")
    assert "libopenblas0-pthread" in tried and (tmp_path / "apt").read_text() == tried
