#!/usr/bin/env bash
# Installs what the tests need and runs all tests, or the given ones: launch/test.sh tests/protocol -k codec
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

set_up test
cd "$root"
preload_openblas # models that a test computes with in its own process cost a third; a thread each, for tests have the cores
export OPENBLAS_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # tests start some hundred processes: each would compile all that it imports
if [ "$#" -eq 0 ]; then # all of them: a file at a time, in the order of tests/conftest.py; one more than cores, for some wait
    set -- -n "$(($(getconf _NPROCESSORS_ONLN) + 1))" --dist loadfile --no-loadscope-reorder
fi
exec "$python" -m pytest "$@"
