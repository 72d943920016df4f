"""Which protocol this is and which release speaks it. Two processes talk only when PROTOCOL_VERSION is the same."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 1


def _installed() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


PACKAGE_VERSION = _installed()
