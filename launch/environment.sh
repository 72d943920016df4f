# Sourced by the other scripts: creates .venv if it is missing or out of date, and finds an OpenBLAS on Linux.
# Runs in bash 3.2. Its output goes to stderr; stdout belongs to the program that follows.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
to_run="serve,${OUTRIDER_MLX:-cpu}" # OUTRIDER_MLX: cpu, cuda or cuda13, for MLX on Linux (docs/install.md)

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "outrider: $*"
    exit 1
}

# On a Mac MLX has wheels for arm64 only. A Python of an Intel Mac, which Rosetta runs, would fail to install it.
is_supported() {
    "$1" -c 'import platform, sys
sys.exit(not (3, 11) <= sys.version_info < (3, 15) or (platform.system(), platform.machine()) == ("Darwin", "x86_64"))' \
        >/dev/null 2>&1
}

# Finds a Python that coremltools supports, which 3.14 is not, before others.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3.14 python3 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && is_supported "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

make_venv() {
    local found
    if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null 2>&1; then # it downloads a Python that coremltools supports if there is none
        uv venv --quiet --allow-existing --python '>=3.11,<3.14' "$venv" >&2 || fail "uv can't create $venv; see its output above"
        is_supported "$python" || fail "uv chose a Python for Intel, which MLX does not support; set PYTHON to one for arm64"
        return
    fi
    found="$(find_python)" || fail "Python 3.11 to 3.14 is needed (on a Mac for arm64: MLX does not support Intel)," \
        "and $(python3 --version 2>&1 || true) is installed; install one of them (python.org, your package manager) or uv"
    if [ "$(uname -s)" = Darwin ] && "$found" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; then
        say "coremltools does not support Python 3.14, so nothing drafts on the Neural Engine; install Python 3.13 for it"
    fi
    "$found" -m venv "$venv" >&2 || fail "$found can't create a virtual environment (on Debian and Ubuntu:" \
        "apt install python3-venv)"
}

install_project() {
    local what="$root$1"
    say "installing outrider and its dependencies into .venv (once)"
    if command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --python "$python" -e "$what" >&2 || fail "the installation failed; see its output above"
        return
    fi
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2
    "$python" -m pip install --quiet --disable-pip-version-check -e "$what" >&2 \
        || fail "the installation failed; see its output above"
}

# set_up EXTRAS: extras of pyproject.toml, comma-separated. A stamp records what was installed, so that the next start
# takes no time, and a user who can only read the checkout can start what its owner has installed.
set_up() {
    local stamp wanted
    stamp="$venv/.outrider-installed-$1"
    wanted="$(cksum <"$root/pyproject.toml")"
    if ! is_installed; then
        if [ ! -w "$root" ] || { [ -e "$venv" ] && [ ! -w "$venv" ]; }; then
            fail "$venv is not ready, and you have no permission to write it; ask its owner to start launch/run_local.sh" \
                "once, or use a copy of your own"
        fi
        exec 9>"$root/.venv.lock"
        if command -v flock >/dev/null 2>&1; then flock 9; fi # if two first starts run at once, one waits
        is_installed || install_all "$1"
        exec 9>&-
    fi
    find_openblas
}

is_installed() { [ -x "$python" ] && is_supported "$python" && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

install_all() {
    if [ ! -x "$python" ] || ! is_supported "$python"; then make_venv; fi
    install_project "[$1]"
    # As pip does for packages: where PYTHONDONTWRITEBYTECODE is set, each start would compile all modules.
    "$python" -m compileall -q "$root/outrider" "$root"/outrider/*/ >&2 || true
    printf '%s\n' "$wanted" >"$stamp"
    case "$1" in test*) printf '%s\n' "$wanted" >"$venv/.outrider-installed-serve,cpu" ;; esac
}

# For programs that run MLX in their own process; the orchestrator does it for the workers of a cluster.
preload_openblas() {
    local setting
    while IFS= read -r setting; do export "${setting?}"; done < <("$python" -P -c '
import os
from outrider.orchestrator.machine.system import OPENBLAS_CORE_VARIABLE, blas_environment
made = blas_environment(dict(os.environ), 1)
for name in made.keys() & {"LD_PRELOAD", OPENBLAS_CORE_VARIABLE}:
    print(f"{name}={made[name]}")
')
}

has_openblas() { "$python" -P -c 'from outrider.orchestrator.machine.system import blas_notes; raise SystemExit(bool(blas_notes()))'; }

# MLX's CPU wheel on Linux carries the reference BLAS; the workers preload OpenBLAS if the system has one.
find_openblas() {
    local tried="$venv/.openblas-tried"
    if [ "$(uname -s)" != Linux ] || has_openblas; then return; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && [ ! -e "$tried" ]; then
        say "installing libopenblas0-pthread, with which MLX verifies several tokens at little more than the cost of one"
        : >"$tried"
        if install_openblas >/dev/null 2>&1 && has_openblas; then return; fi
    fi
    "$python" -P -c 'import sys; from outrider.orchestrator.machine.system import NO_OPENBLAS_NOTE; print("outrider:", NO_OPENBLAS_NOTE, file=sys.stderr)'
}

install_openblas() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y libopenblas0-pthread && return
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y libopenblas0-pthread
}
