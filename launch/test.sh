#!/usr/bin/env bash
# Installs what the tests need and runs all tests, or the given ones: launch/test.sh tests/protocol -k codec
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called with sh
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

set_up test
cd "$root"
# Models in a test's own process are three times as fast with OpenBLAS. Tests run in parallel, so one thread is enough.
preload_openblas
export OPENBLAS_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # else each of the tests' many processes would compile all its imports
if [ "$#" -eq 0 ]; then # one process more than cores, since some tests wait; tests/conftest.py sets the order
    set -- -n "$(($(getconf _NPROCESSORS_ONLN) + 1))" --dist loadfile --no-loadscope-reorder
fi
exec "$python" -m pytest "$@"
