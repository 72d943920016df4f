#!/usr/bin/env bash
# Builds the sdist and from it the wheel, installs only the wheel into an empty environment, and runs every command
# there, in a directory with files named like our packages. Needs the package index; takes some minutes.
#
#   launch/check_wheel.sh             --quick leaves out bench, overlap and tune
#
# Uses a temporary folder, which is removed at the end. The exit code is that of the first failed step.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

quick=""
case "${1:-}" in
    '') ;;
    --quick) quick=yes ;;
    *) fail "there is no flag $1; expected --quick or none" ;;
esac

folder="$(mktemp -d "${TMPDIR:-/tmp}/outrider-wheel.XXXXXX")"
served=""
clean_up() {
    [ -z "$served" ] || kill "$served" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean_up EXIT
unset PYTHONPATH OUTRIDER_MODEL
export OUTRIDER_CACHE="$folder/cache"

# step TITLE COMMAND...: runs a command; prints its last lines if it failed, else its time.
step() {
    local title="$1" started status=0
    shift
    started="$(date +%s)"
    "$@" >"$folder/said" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 30 "$folder/said" >&2
        say "outrider: $title failed with exit code $status"
        exit "$status"
    fi
    say "ok $(($(date +%s) - started)) s  $title"
}

build() {
    local found
    found="$(find_python)" || fail "Python 3.11 to 3.14 is needed"
    "$found" -m venv "$folder/tools" && "$folder/tools/bin/python" -m pip install --quiet build mypy
    # Only files that git tracks, and links as links: other files, such as an old build/, must not be packed.
    mkdir "$folder/tree"
    (cd "$root" && git ls-files -z | tar cf - --null -T -) | tar xf - -C "$folder/tree"
    "$folder/tools/bin/python" -m build --outdir "$folder/dist" "$folder/tree"
}

one_name() {
    local names
    "$folder/tools/bin/python" -m zipfile -l "$(echo "$folder"/dist/*.whl)" >"$folder/listing"
    names="$(awk 'NR > 1 { split($1, part, "/"); if (part[1] !~ /dist-info$/) print part[1] }' "$folder/listing" | sort -u)"
    echo "top-level names: $names"
    [ "$names" = outrider ]
}

install_alone() {
    "$("$folder/tools/bin/python" -c 'import sys; print(sys._base_executable)')" -m venv "$folder/empty"
    "$folder/empty/bin/python" -m pip install --quiet "$(echo "$folder"/dist/*.whl)"
}

install_extras() {
    "$folder/empty/bin/python" -m pip install --quiet "$(echo "$folder"/dist/*.whl)[cpu,serve,bench]"
}

# refused WORDS COMMAND...: checks that the command fails with one line that has these words.
refused() {
    local words="$1" said
    shift
    if said="$("$@" 2>&1)"; then return 1; fi
    echo "$said"
    case "$said" in *$'\n'*) return 1 ;; *"$words"*) ;; *) return 1 ;; esac
}

told_what_is_missing() {
    refused "pip install '.[serve]'" outrider serve || return 1
    refused "comes with a clone" outrider generate --model tiny --prompt x || return 1
    [ "$(uname -s)" = Linux ] || return 0
    refused "pip install '.[cpu]'" outrider generate --prompt x || return 1
    refused "pip install '.[cpu]'" outrider bench
}

# A user's directory with files named like our packages, which end a process that imports them.
other_directory() {
    local room
    mkdir "$folder/away"
    for room in protocol grammar engine drafters target_worker draft_worker prefill_worker orchestrator server fleet bench \
        models; do
        echo 'raise SystemExit("a file of the user was imported as a room")' >"$folder/away/$room.py"
    done
    awk '/^```python/ { inside = 1; next } /^```/ { inside = 0 } inside' "$root/README.md" >"$folder/away/readme.py"
    cat >"$folder/away/client.py" <<'PYTHON'
import sys

from outrider import Client, InvalidRequest, SamplingParams

client = Client(sys.argv[1])
print(client.generate("def f(", SamplingParams(max_tokens=8)).text)
try:
    client.generate("def f(", SamplingParams(max_tokens=0))
except InvalidRequest:
    raise SystemExit(0)
raise SystemExit("max_tokens=0 was not refused")
PYTHON
}

generate_and_verify() {
    outrider generate --prompt "def f(" --max-tokens 32 --temp 0.8 --seed 7 --json >made.json
    outrider verify made.json
}

serve() {
    local status=0 tried=0
    outrider serve --no-http --endpoint "ipc://$folder/socket" &
    served=$!
    while [ ! -S "$folder/socket" ] && [ "$tried" -lt 120 ]; do sleep 1; tried=$((tried + 1)); done
    python client.py "ipc://$folder/socket" || status=$?
    kill "$served"
    wait "$served" || true
    served=""
    return "$status"
}

check_types() { "$folder/tools/bin/mypy" --strict --python-executable "$folder/empty/bin/python" readme.py client.py; }

step "the sdist, and the wheel from it" build
step "one name at its top" one_name
cat "$folder/said" >&2
step "installed into an empty environment" install_alone
step "a directory with files named like the rooms" other_directory
cd "$folder/away"
PATH="$folder/empty/bin:$PATH"
step "version" outrider --version
step "what is missing is told" told_what_is_missing
step "the extras" install_extras
step "completion" outrider completion bash
step "pull" outrider pull
step "doctor" outrider doctor
step "pairs" outrider pairs
step "worker --help" outrider worker --help
step "convert --help" outrider convert --help
step "generate, verify" generate_and_verify
step "serve, and a client" serve
step "the README's script" python readme.py
step "mypy --strict" check_types
if [ -z "$quick" ]; then
    step "bench" outrider bench --classes code --prompts 2 --max-tokens 16 --depths 3 --temps 0
    step "overlap" outrider overlap
    step "tune" outrider tune
fi
