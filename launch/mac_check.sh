#!/usr/bin/env bash
# Runs all checks of the Core ML drafter that need a Mac, and writes one report. Run it once and send the report.
#
#   launch/mac_check.sh                                   the tiny pair, about fifteen minutes
#   launch/mac_check.sh --model T --draft-model D         also a real pair, such as
#       --model mlx-community/Qwen2.5-7B-Instruct-4bit --draft-model mlx-community/Qwen2.5-0.5B-Instruct-bf16
#   --report FILE (mac-report.md)   --predictions N (1000)   --quick (20 predictions, few tokens)
#
# A failed step is recorded and the next one runs, because a crash of Core ML is a result, too.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called with sh
set -uo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

target="$root/models/target"
draft="$root/models/draft"
report="mac-report.md"
predictions=1000
tokens=128
real_pair=""
while [ "$#" -gt 0 ]; do
    case "$1" in
        --model) [ "$#" -gt 1 ] || fail "--model needs a model"; target="$2"; real_pair=yes; shift 2 ;;
        --draft-model)
            [ "$#" -gt 1 ] || fail "--draft-model needs a model"; draft="$2"; real_pair=yes; shift 2 ;;
        --report) [ "$#" -gt 1 ] || fail "--report needs a file"; report="$2"; shift 2 ;;
        --predictions) [ "$#" -gt 1 ] || fail "--predictions needs a number"; predictions="$2"; shift 2 ;;
        --quick) predictions=20; tokens=32; shift ;;
        *) fail "there is no flag $1; expected --model, --draft-model, --report, --predictions or --quick" ;;
    esac
done
case "$predictions" in '' | *[!0-9]*) fail "--predictions is '$predictions'; expected a whole number" ;; esac
: >"$report" || fail "$report can't be written; name another file with --report"
case "$report" in /*) ;; *) report="$PWD/$report" ;; esac
if [ "$(uname -s)" != Darwin ]; then
    say "outrider: this is not a Mac: the reference interpreter stands in for Core ML, which only shows that the check works"
    export OUTRIDER_COREML_STAND_IN=tests.harness.mil_interpreter
fi

# step TITLE COMMAND...: runs a command; its output goes to the report, its progress to the screen.
step() {
    local title="$1" started status
    shift
    say "== $title"
    started="$(date +%s)"
    {
        printf '\n## %s\n\n`%s`\n\n```\n' "$title" "$*"
        { "$@" 2>&1 >&3 | tee "$report.stderr" >&4; } 3>&1
        status=${PIPESTATUS[0]}
        printf '```\n'
        if [ "$status" -ne 0 ] || [ "${keep_stderr:-}" = yes ]; then
            printf '\n```\n'
            tail -n 30 "$report.stderr"
            printf '```\n'
        fi
        printf '\nexit code %s, %s s\n' "$status" "$(($(date +%s) - started))"
    } 4>&2 >>"$report"
}

generate() {
    local mode="$1" backend="$2"
    shift 2
    for prompt in "def fibonacci(n):" "class Stack:" "import os"; do
        "$python" -P -m outrider generate --model "$target" --draft-model "$draft" --draft-backend "$backend" \
            --mode "$mode" --prompt "$prompt" --max-tokens "$tokens" --ignore-chat-template --json "$@" || return
    done
}

# folder_of MODEL: prints its directory. A model given by its id is downloaded into the cache if it is missing.
folder_of() {
    "$python" -P -c 'import sys; from outrider.orchestrator.pairing.model_files import find_model
print(find_model(sys.argv[1]).folder)' "$1"
}

set_up test
"$python" -P -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("coremltools") is None)' \
    || fail "coremltools is not installed; run rm -r .venv, then PYTHON=python3.13 launch/mac_check.sh"
preload_openblas
target="$(folder_of "$target")" && draft="$(folder_of "$draft")" || exit 1
cd "$root" || exit 1
printf '# Outrider on a Mac\n\n%s, %s, draft `%s`, target `%s`\n' "$(date -u +%Y-%m-%dT%H:%MZ)" \
    "$(git rev-parse --short HEAD 2>/dev/null || printf 'no commit')" "$draft" "$target" >>"$report"

step "This machine, and the time per token of each placement" "$python" -P -m outrider.drafters.coreml.doctor --model "$draft" --probe
step "Tests that need macOS" "$python" -m pytest -m macos -rs -v --timeout 1800 tests/coreml
step "Every weight kind and unit: agreement, placement, latency, a soak of $predictions predictions; the GPU at the same time" \
    "$python" -P -m tools.coreml_survey --model "$draft" --target "$target" --predictions "$predictions"
keep_stderr=yes step "Overlap timing, MLX drafter" "$python" -P -m tools.overlap_timing --model "$target" \
    --draft-model "$draft"
keep_stderr=yes step "Overlap timing, Core ML drafter" "$python" -P -m tools.overlap_timing --model "$target" \
    --draft-model "$draft" --draft-backend coreml
step "AR" generate ar mlx
step "SD, MLX drafter" generate sd mlx
step "SD, Core ML drafter" generate sd coreml
step "SSD, MLX drafter" generate ssd mlx
step "SSD, Core ML drafter" generate ssd coreml
step "SSD, MLX drafter, prompts read by Core ML" generate ssd mlx --draft-prefill coreml
[ -n "$real_pair" ] || printf '\nOnly the tiny pair was run; name a real one with --model and --draft-model.\n' >>"$report"
rm -f "$report.stderr"
say "the report is in $report"
