#!/usr/bin/env bash
# Sets up what the tests need and runs them all, or those that are named: launch/test.sh tests/protocol -k codec
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

set_up test
cd "$root"
if [ "$#" -eq 0 ]; then # all of them: a file at a time on each core
    set -- -n auto --dist loadfile
fi
exec "$python" -m pytest "$@"
