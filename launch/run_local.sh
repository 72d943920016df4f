#!/usr/bin/env bash
# Runs Outrider on this machine: with --prompt it completes it and ends, without it serves until Ctrl-C.
# Takes the flags of `outrider generate` and `outrider serve`; makes .venv on the first start.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

command=serve
for argument in "$@"; do
    case "$argument" in
        --prompt | --prompt=* | -p | -p?*) command=generate ;;
    esac
done

set_up ""
exec "$python" -P -m outrider "$command" "$@"
