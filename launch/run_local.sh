#!/usr/bin/env bash
# Runs Outrider on this machine: with --prompt it completes the prompt, else it serves until Ctrl-C.
# Takes the flags of `outrider generate` and `outrider serve` (--help shows both); creates .venv on the first start.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called with sh
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

command=serve
for argument in "$@"; do
    case "$argument" in
        -h | --help) command=help ;;
        --prompt | --prompt=* | -p | -p?*) [ "$command" = help ] || command=generate ;;
    esac
done

set_up "$to_run"
if [ "$command" = help ]; then
    printf 'With --prompt this completes the prompt and ends; it takes the flags of outrider generate:\n\n'
    "$python" -P -m outrider generate --help
    printf '\nWithout --prompt it serves until Ctrl-C; it takes the flags of outrider serve:\n\n'
    exec "$python" -P -m outrider serve --help
fi
exec "$python" -P -m outrider "$command" "$@"
