#!/usr/bin/env bash
# Installs what the fleet's tests need, including Ray, and runs them: fake hosts on this machine, some minutes, 4 GB.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called with sh
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

set_up test,fleet
cd "$root"
exec "$python" -m pytest -m fleet -W ignore::pydantic.PydanticDeprecatedSince20 "${@:-tests/fleet}"
