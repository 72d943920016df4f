"""The launch scripts, without installing anything: the commands that they run, and errors if something is missing."""

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
def checkout(tmp_path):
    """A folder with copies of the scripts and a pyproject.toml."""
    root = tmp_path / "a tree"
    (root / "launch").mkdir(parents=True)
    for name in SCRIPTS:
        (root / "launch" / name).write_bytes((ROOT / "launch" / name).read_bytes())
    (root / "pyproject.toml").write_text("[project]\n")
    return root


def write_executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def add_fake_venv(root):
    """Adds a .venv with a fake python, which passes every check, needs no BLAS and prints installs and other calls."""
    write_executable(
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
def test_run_local_generates_with_a_prompt_and_serves_without(checkout, flag):
    add_fake_venv(checkout)
    done = run(checkout, "run_local.sh", *flag, "--seed", "1")
    assert done.stdout == "|".join(["-P", "-m", "outrider", "generate", *flag, "--seed", "1", "cwd=/\n"]), done.stderr
    assert run(checkout, "run_local.sh", "--mode", "ar").stdout == "-P|-m|outrider|serve|--mode|ar|cwd=/\n"


def test_the_second_start_installs_nothing_until_pyproject_changes(checkout):
    """The first start also compiles the modules."""
    add_fake_venv(checkout)
    first = run(checkout, "run_local.sh").stderr
    assert "INSTALL" in first and f"-m|compileall|-q|{checkout}/outrider|" in first
    assert run(checkout, "run_local.sh").stderr == ""
    (checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert "INSTALL" in run(checkout, "run_local.sh").stderr


@pytest.mark.parametrize(("environment", "extras"), [({}, "serve,cpu"), ({"OUTRIDER_MLX": "cuda"}, "serve,cuda")])
def test_first_start_installs_the_server_and_the_chosen_mlx_extra(checkout, environment, extras):
    add_fake_venv(checkout)
    assert f"-e {checkout}[{extras}]\n" in run(checkout, "run_local.sh", **environment).stderr
    assert run(checkout, "run_local.sh", **environment).stderr == ""


def test_test_script_installs_its_extra_which_covers_run_local(checkout):
    add_fake_venv(checkout)
    done = run(checkout, "test.sh", "tests/protocol", "-k", "codec")
    assert f"-e {checkout}[test]" in done.stderr
    assert done.stdout == f"-m|pytest|tests/protocol|-k|codec|cwd={checkout}\n"
    assert run(checkout, "run_local.sh").stderr == ""


def test_test_script_runs_on_a_machine_that_needs_no_blas(checkout):
    """As on a Mac, where Accelerate needs no environment variables."""
    python = checkout / ".venv/bin/python"
    add_fake_venv(checkout)
    no_blas = "import outrider.orchestrator.machine.system as s; s.blas_environment = lambda base, threads: base"
    python.write_text(
        python.read_text().replace(
            '*"-c "*|',
            f"""*blas_environment*) shift 2; PYTHONPATH={ROOT} exec {sys.executable} -c '{no_blas}; exec("""
            """__import__("sys").argv[1])' "$1" ;;\n*"-c "*|""",
        )
    )
    done = run(checkout, "test.sh", "tests/protocol")
    assert done.returncode == 0 and "export" not in done.stderr, done.stderr
    assert done.stdout.startswith("-m|pytest|tests/protocol|")


@pytest.mark.parametrize(("output", "status"), [("no, run pip", 0), ("no, run pip\nTraceback", 1), ("no", 1)])
def test_wheel_check_recognizes_a_refusal_also_with_a_macs_tools(tmp_path, output, status):
    write_executable(tmp_path / "wc", 'printf \'%8d\\n\' "$(/usr/bin/wc "$@")"')  # BSD's wc indents
    write_executable(tmp_path / "outrider", f"printf '%s\\n' '{output}'; exit 1")
    text = (ROOT / "launch/check_wheel.sh").read_text()
    refused = text[text.index("refused() {") : text.index("told_what_is_missing() {")]
    done = subprocess.run(
        ["bash", "-euc", f"{refused}\nrefused 'run pip' outrider serve"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert done.returncode == status


def test_fleet_test_script_installs_ray_and_runs_only_fleet_tests(checkout):
    add_fake_venv(checkout)
    done = run(checkout, "test_fleet.sh")
    assert f"-e {checkout}[test,fleet]" in done.stderr
    assert done.stdout.startswith("-m|pytest|-m|fleet|") and done.stdout.endswith(f"|tests/fleet|cwd={checkout}\n")


@pytest.mark.skipif(shutil.which("dash") is None, reason="needs a shell that is not bash")
@pytest.mark.parametrize(
    ("script", "called"), [("run_local.sh", "-P|-m|outrider|generate|-p|a  b|"), ("test.sh", "-m|pytest|-p|a  b|")]
)
def test_script_can_be_called_with_another_shell(checkout, script, called):
    add_fake_venv(checkout)
    done = subprocess.run(
        ["dash", script, "-p", "a  b"],
        capture_output=True, text=True, timeout=200, cwd=checkout / "launch", env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.startswith(called), done.stderr


@pytest.mark.parametrize("link", ["elsewhere/outrider", "a tree/relative"])
def test_script_can_be_called_through_a_symlink(checkout, tmp_path, link):
    add_fake_venv(checkout)
    path = tmp_path / link
    path.parent.mkdir(exist_ok=True)
    target = checkout / "launch/run_local.sh"
    path.symlink_to(target if "elsewhere" in link else target.relative_to(path.parent))
    (tmp_path / "twice").symlink_to(path)
    for name in (path, tmp_path / "twice"):
        done = subprocess.run(["bash", str(name), "--mode", "ar"], capture_output=True, text=True, cwd="/", timeout=200)
        assert done.stdout == "-P|-m|outrider|serve|--mode|ar|cwd=/\n", done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["-p", "x", "--help"], ["--help", "-p", "x"]])
def test_help_of_run_local_covers_generate_and_serve(checkout, arguments):
    add_fake_venv(checkout)
    out = run(checkout, "run_local.sh", *arguments).stdout
    assert "-P|-m|outrider|generate|--help|" in out and "-P|-m|outrider|serve|--help|" in out
    assert "With --prompt this completes" in out and "Without --prompt it serves" in out


@pytest.fixture
def run_as_other_user(checkout):
    """Runs a script as another user, who can read the checkout, but not write to it."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def start(script, *arguments):
        for path in (checkout, *checkout.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        for path in (checkout.parent, *checkout.parent.parents):
            if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                path.chmod(0o755)
        return subprocess.run(
            ["bash", str(checkout / "launch" / script), *arguments],
            capture_output=True, text=True, timeout=99, cwd="/", env={"PATH": "/usr/bin:/bin", "HOME": "/"}, user=65534,
        )  # fmt: skip

    return start


def test_other_user_can_start_an_installed_checkout_but_not_install_it(checkout, run_as_other_user):
    add_fake_venv(checkout)
    done = run_as_other_user("run_local.sh")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no permission to write it; ask its owner to start launch/run_local.sh once" in done.stderr
    run(checkout, "run_local.sh")
    done = run_as_other_user("run_local.sh")
    assert (done.stdout, done.stderr) == ("-P|-m|outrider|serve|cwd=/\n", "")


def test_mac_check_shows_progress_preloads_blas_and_writes_a_report(checkout, tmp_path):
    write_executable(
        checkout / ".venv/bin/python",
        'case "$*" in\n'
        "*blas_environment*) echo LD_PRELOAD=/lib/such-a-blas.so ;;\n"
        '*"-c "*|*"--version"*|*"pip install"*) exit 0 ;;\n'
        '*survey*) echo "survey: half way" >&2; echo "a table, $LD_PRELOAD"; exit 3 ;;\n'
        '*) echo "on the way" >&2; echo "result" ;;\n'
        "esac",
    )
    report = tmp_path / "report.md"
    done = run(checkout, "mac_check.sh", "--quick", "--report", str(report))
    assert done.returncode == 0 and done.stdout == ""
    assert "survey: half way" in done.stderr and done.stderr.count("on the way") > 5
    written = report.read_text()
    assert "a table, /lib/such-a-blas.so" in written and "exit code 3" in written and written.count("exit code 0") > 5
    assert "survey: half way" in written  # the output of a step that failed
    assert not list(tmp_path.glob("*.stderr"))


def test_mac_check_needs_coremltools(checkout, tmp_path):
    add_fake_venv(checkout)
    python = checkout / ".venv/bin/python"
    python.write_text(python.read_text().replace('*"-c "*|', '*find_spec*) exit 1 ;;\n*"-c "*|'))
    done = run(checkout, "mac_check.sh", "--report", str(tmp_path / "report.md"))
    assert done.returncode == 1 and (tmp_path / "report.md").read_text() == ""
    assert "outrider: coremltools is not installed; run rm -r .venv, then PYTHON=python3.13 launch/" in done.stderr


def test_a_failed_installation_is_tried_again(checkout):
    add_fake_venv(checkout)
    good = (checkout / ".venv/bin/python").read_text()
    write_executable(checkout / ".venv/bin/python", 'case "$*" in *"pip install"*) exit 1 ;; esac')
    done = run(checkout, "run_local.sh")
    assert done.returncode == 1 and "installation failed" in done.stderr
    (checkout / ".venv/bin/python").write_text(good)
    assert "INSTALL" in run(checkout, "run_local.sh").stderr


@pytest.mark.parametrize(
    ("version", "system"), [((3, 9, 6), ("Linux", "aarch64")), ((3, 15, 0), ("Darwin", "arm64")),
                            ((3, 13, 2), ("Darwin", "x86_64"))]
)  # fmt: skip
def test_unsupported_python_is_a_one_line_error(checkout, tmp_path, version, system):
    """The last one is a Python for Intel on a Mac, which Rosetta can run."""
    old, named = tmp_path / "old", ".".join(map(str, version))
    for name in ("python3", "python"):
        setup = f"import platform, sys; sys.version_info = {version}; system = {system}"
        setup += "; platform.system, platform.machine = lambda: system[0], lambda: system[1]; exec(sys.argv[1])"
        write_executable(
            old / name,
            f'[ "$1" = --version ] && echo "Python {named}" && exit 0\n'
            f"""[ "$1" = -c ] && exec '{sys.executable}' -c "{setup}" "$2"\nexit 1""",
        )
    for tool in ("bash", "dirname", "readlink", "cksum", "cat", "uname", "id", "flock"):
        if (found := shutil.which(tool)) is not None:  # macOS has no flock
            (old / tool).symlink_to(found)
    done = run(checkout, "run_local.sh", path=str(old))
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


def test_ci_tests_with_the_python_that_it_set_up(checkout, tmp_path):
    """Not with another Python of the runner's system, such as Ubuntu 24.04's python3.12, or one that uv finds."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    for name in ("uv", "python", "python3", "python3.12", "python3.13"):
        write_executable(tmp_path / "tools" / name, f'[ "$1" = -c ] || echo "{name} $*"')
    done = subprocess.run(
        ["bash", "-c", f". '{checkout}/launch/environment.sh' && make_venv"],
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin", **workflow.get("env", {})}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == f"python -m venv {checkout}/.venv\n"


def test_uv_is_used_when_available(checkout, tmp_path):
    add_fake_venv(checkout)
    write_executable(tmp_path / "bin/uv", 'echo "UV $*" >&2')
    done = run(checkout, "run_local.sh", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert f"UV pip install --quiet --python {checkout}/.venv/bin/python -e {checkout}" in done.stderr
    assert "INSTALL" not in done.stderr


def test_uv_that_chooses_a_python_for_intel_is_reported(checkout, tmp_path):
    python = checkout / ".venv/bin/python"
    write_executable(tmp_path / "bin/uv", f'mkdir -p "{python.parent}" && ln -s /bin/false "{python}"')
    done = run(checkout, "run_local.sh", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (1, "")
    expected = "uv chose a Python for Intel, which MLX does not support; set PYTHON to one for arm64"
    assert done.stderr == f"outrider: {expected}\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is used on Linux only")
def test_openblas_is_installed_once_by_root_and_only_reported_to_others(checkout, tmp_path):
    tools = tmp_path / "tools"
    write_executable(tools / "apt-get", f'echo "$*" >>{tmp_path}/apt; exit 100')
    python = checkout / ".venv/bin/python"
    add_fake_venv(checkout)
    python.write_text(
        python.read_text().replace(
            '*"-c "*|', '*blas_notes*) exit 1 ;;\n*NO_OPENBLAS_NOTE*) echo "NO BLAS" >&2 ;;\n*"-c "*|'
        )
    )
    for user, wanted in (("1000", False), ("0", True)):
        write_executable(tools / "id", f"echo {user}")
        done = run(checkout, "run_local.sh", path=f"{tools}:/usr/bin:/bin")
        assert "NO BLAS" in done.stderr and done.stdout.startswith("-P|-m|outrider|serve|")
        assert os.path.exists(tmp_path / "apt") is wanted
    tried = (tmp_path / "apt").read_text()
    run(checkout, "run_local.sh", path=f"{tools}:/usr/bin:/bin")
    assert "libopenblas0-pthread" in tried and (tmp_path / "apt").read_text() == tried


def test_overlap_timing_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "launch/overlap_timing.py"), "--model", "tiny", "--rounds", "2"]
    timed = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert timed.returncode == 0, timed.stderr
    lines = timed.stdout.splitlines()
    assert [line.split("  ")[1] for line in lines[1:4]] == ["verify alone", "work ahead alone", "both together"]
